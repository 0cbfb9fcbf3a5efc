"""A run stopped anywhere and continued ends with bitwise the same state as one that was never stopped."""

import pytest
import torch

from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.csv_file import read_rows
from tests.engine.running import assert_same_end, config_file, launch, logs, run_here, same, state

STEPS = 5  # per epoch
CALM = {'drop': 0.0, 'drop_path': 0.0, 'log_interval': 1}


@pytest.fixture(scope='module')
def whole(tmp_path_factory, scans):
    folder = tmp_path_factory.mktemp('whole')
    run_here(folder, **scans)
    return folder


@pytest.mark.parametrize('stop_at', range(1, 2 * STEPS + 1))
def test_stopped_run_ends_the_same(whole, scans, tmp_path, stop_at):
    assert run_here(tmp_path, stop_at=stop_at, **scans) is None
    assert read_checkpoint(tmp_path / 'last.pt')['step'] == stop_at
    assert run_here(tmp_path, resume='auto', **scans)['step'] == 2 * STEPS
    assert_same_end(whole, tmp_path)


def test_comparison_notices_another_seed(whole, scans, tmp_path):
    run_here(tmp_path, **scans, seed=43)
    assert '/state_dict/head.weight' in same(state(whole), state(tmp_path))


def test_stopped_twice_with_other_workers(whole, scans, tmp_path):
    run_here(tmp_path, stop_at=3, workers=2, **scans)
    run_here(tmp_path, resume='auto', stop_at=4, **scans)
    run_here(tmp_path, resume='auto', workers=1, **scans)
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
def test_precision_and_speed_options_survive(scans, tmp_path, name):
    _compare(tmp_path, {**SPEEDS[name], **scans})
    if name == 'float16':
        assert state(tmp_path / 'a')['scaler']['scale'] > 0


@pytest.mark.slow
def test_inductor_survives(scans, tmp_path):
    _compare(tmp_path, {'torchcompile': 'inductor', 'amp': True, **scans})


def _compare(folder, options):
    run_here(folder / 'a', **options)
    run_here(folder / 'b', stop_at=4, **options)
    run_here(folder / 'b', resume='auto', **options)
    assert same(state(folder / 'a'), state(folder / 'b')) == []


def test_finished_run_says_so_and_exits_zero(whole, scans, tmp_path):
    before = (whole / 'last.pt').read_bytes()
    args = '--config', config_file(tmp_path, **scans), '--output', whole, '--resume', 'auto'
    said = launch('train.py', *args).stdout
    assert f'is finished: 2 epochs, {2 * STEPS} steps; nothing left to do' in said
    assert (whole / 'last.pt').read_bytes() == before


def test_another_world_size_continues_on_the_same_order(scans, tmp_path):
    """Stopped with one process, continued with two: the sample order and the global batch stay."""
    keys = {**scans, **CALM}
    run_here(tmp_path / 'one', **keys)
    run_here(tmp_path / 'two', stop_at=3, **keys)
    file = config_file(tmp_path, **keys)
    launch('train.py', '--config', file, '--output', tmp_path / 'two', '--resume', 'auto', processes=2)
    one, two = ([float(row['loss']) for row in read_rows(tmp_path / name / 'steps.csv')] for name in ('one', 'two'))
    assert len(one) == len(two) == 2 * STEPS
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), atol=1e-5, rtol=0)


def test_two_processes_stop_together_and_continue_exactly(scans, tmp_path):
    """One rank gets a signal; both leave at the same step, and the continuation ends as an undisturbed run."""
    file = config_file(tmp_path, **scans)
    launch('train.py', '--config', file, '--output', tmp_path / 'a', processes=2)
    done = launch('tests/engine/stopping.py', file, tmp_path / 'b', 7, processes=2, expect=1)  # torchrun's own code
    assert 'stopped at step 7; the last checkpoint is that of step 7' in done.stdout
    assert 'exitcode  : 75' in done.stderr
    launch('train.py', '--config', file, '--output', tmp_path / 'b', '--resume', 'auto', processes=2)
    assert same(state(tmp_path / 'a'), state(tmp_path / 'b')) == []
    assert logs(tmp_path / 'a') == logs(tmp_path / 'b')


def test_checkpoint_every_few_steps(scans, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(
        'nprf_vit.engine.checkpoint.saver.save_checkpoint',
        lambda state, path, *keep: saved.append((path.name, state['step'])),
    )
    run_here(tmp_path, recovery_interval=3, **{**scans, 'epochs': 1, 'warmup_epochs': 0})
    assert saved == [('last.pt', 3), ('best.pt', 5), ('last.pt', 5)]
