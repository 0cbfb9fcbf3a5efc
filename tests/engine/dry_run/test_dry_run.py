"""A dry run says what it does, scales down what would take too long or too much, and labels what it did not measure."""

import re
import resource

import pytest
import torch

from nprf_vit.data.batch_plan import BatchPlan
from nprf_vit.engine.dry_run import memory
from nprf_vit.engine.dry_run import run as module
from nprf_vit.engine.dry_run.memory_count import CannotCount
from nprf_vit.engine.dry_run.run import Run, dry_run, significant
from nprf_vit.engine.dry_run.trials import Bench, Trial, at
from nprf_vit.errors import InputError, RunError
from tests.engine.running import ONE, ROOT, config_file, in_child, launch, small_config

CPU = torch.device('cpu')


def grid(cost):
    return [Trial(b, d, cost(b, d), cost(b, d)) for d in (1, 2) for b in (2, 4)]


@pytest.mark.parametrize('name', ['seconds', 'memory'])
def test_lines_over_batch_and_depth_meet_what_they_should(name):
    def cost(batch, depth):
        return 1 + 2 * batch + 0.5 * depth + 3 * batch * depth

    assert at(grid(cost), 128, 12, name) == pytest.approx(cost(128, 12))
    assert at(grid(cost), 4, 2, name) == cost(4, 2)
    assert at([Trial(2, 12, 3.0, 3.0)], 8, 12, name) == pytest.approx(12)


def test_noise_does_not_turn_a_line_upside_down():
    def cost(batch, depth):  # the larger batch came out faster
        return 10.0 - batch

    assert at(grid(cost), 128, 12, 'seconds') > 3 * cost(2, 1)
    steep = [Trial(1, 1, 1.0, 1.0), Trial(2, 1, 10.0, 10.0)]  # and more than in proportion
    assert at(steep, 4, 1, 'seconds') == pytest.approx(20)


@pytest.mark.parametrize(
    ('value', 'text'), [(0.0123, '0.0123'), (3.456e-5, '3.46e-05'), (335.2, '335'), (12345.6, '12,346')]
)
def test_no_number_is_rounded_to_nothing(value, text):
    assert significant(value) == text


def test_what_is_said(tmp_path):
    file = config_file(tmp_path, global_batch=256, batch_size=32)
    said = launch('train.py', '--config', file, '--dry-run').stdout.splitlines()
    assert said[0].startswith('dry run of nprf_deit_tiny with embed_dim=32, depth=2')
    assert re.match(r'building the model; 0\.\d+ GiB in use', said[1])
    assert 'trying a batch of 2 per device, 1 of 2 blocks' in said and 'trying a batch of 32 per device' in said
    assert said[-3].startswith('memory per device: ') and ' images/s on synthetic images' in said[-2]
    assert not any('extrapolated' in line for line in said)


class Imagined(Bench):
    """Trials that take what is said, and run out of memory beyond `fits` images."""

    def __init__(self, second_per_block, fits=10**9, **changes):
        super().__init__(small_config(**changes), ONE, print, depth=12, images=1000)
        self.second_per_block, self.fits, self.tried = second_per_block, fits, []

    def trial(self, batch, depth):
        self.tried.append((batch, depth))
        return Trial(batch, depth, self.second_per_block * batch * depth, 1.0) if batch <= self.fits else None


WHOLE = Run(BatchPlan(256, 1, 64, 4), 1, 12, 1000, 4)


@pytest.mark.parametrize(
    ('bench', 'used'),
    [
        (Imagined(0.01), [(64, 12)]),
        (Imagined(0.1), [(2, 12), (4, 12)]),
        (Imagined(1.0), [(2, 1), (2, 2), (4, 1), (4, 2)]),
        (Imagined(5.0), [(2, 1), (2, 2)]),
        (Imagined(100.0), [(2, 1)]),
        (Imagined(0.001, fits=63), [(2, 12), (4, 12)]),
        (Imagined(0.001, fits=3), [(2, 1), (2, 2)]),
    ],
)
def test_a_slow_machine_is_given_less(bench, used):
    trials = module._on_cpu(bench, WHOLE, print)
    assert [(trial.batch, trial.depth) for trial in trials] == used
    assert at(trials, 64, 12, 'seconds') == pytest.approx(bench.second_per_block * 64 * 12)


def test_a_machine_that_fits_nothing():
    with pytest.raises(RunError, match='memory runs out with 2 images and one block'):
        module._on_cpu(Imagined(1.0, fits=1), WHOLE, print)


@pytest.mark.parametrize('countable', [True, False])
def test_what_was_extrapolated_says_so(monkeypatch, capsys, countable):
    def refuse(run):
        raise CannotCount('an operation')

    monkeypatch.setattr(module, 'CPU_SECONDS', 1e-6)
    if not countable:
        monkeypatch.setattr(module, 'count_memory', refuse)
    config = small_config(model_kwargs={'embed_dim': 32, 'depth': 5, 'num_heads': 2, 'patch_size': 2})
    result = dry_run(config, ONE)
    said = capsys.readouterr().out
    assert result['extrapolated'] and result['images_per_s'] > 0 and (result['memory_count'] is None) != countable
    assert 'not measured but extrapolated from a batch of 2 with 1 of 5 blocks:' in said
    assert len(re.findall(r'^(?:\S+ images/s|estimated).*\(extrapolated\)$', said, re.M)) == 2
    told = 'about .*(counted tensor by tensor)' if countable else 'at most .*(extrapolated)'
    assert re.search(f'^memory per device: {told}$'.replace('(', r'\(').replace(')', r'\)'), said, re.M)
    assert ('memory cannot be counted (an operation): extrapolated as well' in said) != countable


def test_weights_that_are_not_here_are_not_needed(capsys):
    dry_run(small_config(initial_checkpoint='deit.pth'), ONE)
    assert 'initial_checkpoint deit.pth is not here' in capsys.readouterr().out


def test_a_model_without_blocks(capsys):
    config = small_config(model='resnet18', model_kwargs={}, drop=0.0, drop_path=0.0, img_size=32)
    assert dry_run(config, ONE)['parameters'] > 1e7
    assert 'blocks' not in capsys.readouterr().out


def test_the_allocator_refuses():
    """A real limit and a real error of torch's allocator; in a process of its own, which keeps the limit."""

    def work():
        bench = Bench(small_config(img_size=64), ONE, print, depth=2, images=100_000)
        resource.setrlimit(resource.RLIMIT_AS, (memory._status('VmSize') + 2**30, resource.RLIM_INFINITY))
        assert memory.available(CPU) <= 2**30
        assert bench.trial(2, 1) is not None
        assert bench.trial(2048, 2) is None
        assert bench.trial(2, 2) is not None, 'what the failed trial held was released'

    assert in_child(work) == 0


def test_memory_that_runs_out_lowers_the_batch_on_a_gpu(capsys):
    class Small(Bench):
        def trial(self, batch, depth):
            return Trial(batch, depth, 1.0, 1e9) if batch <= self.fits else None

    bench = Small(small_config(), ONE, print, depth=2, images=1000)
    run = Run(BatchPlan(256, 1, 64, 4), 1, 2, 1000, 4)
    bench.fits = 20
    assert [t.batch for t in module._on_gpu(bench, run, print)] == [16]
    assert capsys.readouterr().out.splitlines() == [
        'memory ran out: trying a batch of 32 per device',
        'memory ran out: trying a batch of 16 per device',
    ]
    bench.fits = 0
    with pytest.raises(RunError, match='memory runs out with 2 images'):
        module._on_gpu(bench, run, print)


@pytest.mark.parametrize(
    ('error', 'expected'),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError('CUDA out of memory'), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError('std::bad_alloc'), True),
        (RuntimeError('mat1 and mat2 shapes cannot be multiplied'), False),
        (InputError('img_size 7 is not divisible'), False),
    ],
)
def test_which_errors_mean_too_little_memory(error, expected):
    assert memory.ran_out(error) == expected
    wrapped = InputError('cannot build')
    wrapped.__cause__ = error
    assert memory.ran_out(wrapped) == expected


@pytest.mark.slow
@pytest.mark.parametrize('name', [str(p.relative_to(ROOT)) for p in sorted((ROOT / 'configs').rglob('*.yaml'))])
def test_every_shipped_config(name):
    unknown = any(word in name for word in ('fashion', 'own_images'))  # only the data says how many images
    images = ['--set', 'train_images=60000'] if unknown else []
    said = launch('train.py', '--config', name, '--dry-run', *images).stdout
    assert ' images/s' in said and ' 0 images/s' not in said and 'days' in said
