"""A run stopped anywhere and continued ends with bitwise the same state as one that was never stopped."""

import pytest
import torch

from nprf_vit.engine.checkpoint import read_checkpoint
from nprf_vit.engine.output import read_rows

from .running import config_file, launch, run_here, same, without_timing

STEPS = 11  # per epoch


def state(folder):
    content = read_checkpoint(folder / 'last.pt')
    content['history'] = without_timing(content['history'])
    content['best'] = without_timing([content['best']])
    return content


def logs(folder):
    return [without_timing(read_rows(folder / name)) for name in ('steps.csv', 'summary.csv')]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    run_here(folder)
    return folder


@pytest.mark.parametrize('stop_at', [1, STEPS, STEPS + 3, 2 * STEPS])
def test_stopped_run_ends_the_same(whole, tmp_path, stop_at):
    assert run_here(tmp_path, stop_at=stop_at) is None
    assert read_checkpoint(tmp_path / 'last.pt')['step'] == stop_at
    assert run_here(tmp_path, resume='auto')['step'] == 2 * STEPS
    assert same(state(whole), state(tmp_path)) == []
    assert logs(whole) == logs(tmp_path)
    best = [read_checkpoint(folder / 'best.pt')['state_dict'] for folder in (whole, tmp_path)]
    assert same(*best) == []


def test_comparison_notices_another_seed(whole, tmp_path):
    run_here(tmp_path, seed=43)
    assert '/state_dict/head.weight' in same(state(whole), state(tmp_path))


def test_stopped_twice_with_workers(whole, tmp_path):
    run_here(tmp_path, stop_at=3, workers=2)
    run_here(tmp_path, resume='auto', stop_at=5)
    run_here(tmp_path, resume='auto', workers=1)
    left, right = state(whole), state(tmp_path)
    left['config'] = right['config'] = None
    assert same(left, right) == []


SPEEDS = {
    'bfloat16': {'amp': True, 'amp_dtype': 'bfloat16', 'clip_grad': 1.0},
    'float16': {'amp': True, 'amp_dtype': 'float16', 'clip_grad': 1.0},
    'checkpointing': {'grad_checkpointing': True, 'clip_grad': 0.5, 'clip_mode': 'agc'},
    'compiled': {'torchcompile': 'aot_eager'},
    'ema_warmup': {'model_ema_warmup': True, 'sched': 'step', 'decay_epochs': 1, 'opt': 'lamb'},
}


@pytest.mark.parametrize('name', SPEEDS)
def test_precision_and_speed_options_survive(tmp_path, name):
    a, b = tmp_path / 'a', tmp_path / 'b'
    options = {**SPEEDS[name], 'epochs': 2, 'global_batch': 256}
    run_here(a, **options)
    run_here(b, stop_at=4, **options)
    run_here(b, resume='auto', **options)
    assert same(state(a), state(b)) == []
    if name == 'float16':
        assert state(a)['scaler']['scale'] > 0


def test_finished_run_says_so_and_exits_zero(tmp_path):
    file = config_file(tmp_path, epochs=1, warmup_epochs=0)
    args = '--config', file, '--output', tmp_path / 'out', '--resume', 'auto'
    launch('train.py', *args)
    before = (tmp_path / 'out' / 'last.pt').read_bytes()
    said = launch('train.py', *args).stdout
    assert 'is finished: 1 epochs, 11 steps; nothing left to do' in said
    assert (tmp_path / 'out' / 'last.pt').read_bytes() == before


def test_another_world_size_continues_on_the_same_order(whole, tmp_path):
    """Stopped with one process, continued with two: the sample order and the global batch stay."""
    calm = {'drop': 0.0, 'drop_path': 0.0, 'log_interval': 1}
    run_here(tmp_path / 'one', **calm)
    run_here(tmp_path / 'two', stop_at=9, **calm)
    file = config_file(tmp_path, **calm)
    launch('train.py', '--config', file, '--output', tmp_path / 'two', '--resume', 'auto', processes=2)
    one, two = ([float(row['loss']) for row in read_rows(tmp_path / name / 'steps.csv')] for name in ('one', 'two'))
    assert len(one) == len(two) == 2 * STEPS
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), atol=1e-5, rtol=0)


def test_checkpoint_every_few_steps(tmp_path):
    run_here(tmp_path, stop_at=6, recovery_interval=5)
    assert read_checkpoint(tmp_path / 'last.pt')['step'] == 6
    assert not list(tmp_path.glob('.*tmp'))
