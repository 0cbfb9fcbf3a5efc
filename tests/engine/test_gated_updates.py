"""Updates that the device leaves out by itself, while the host is one step behind: the same run in every respect.

On a CPU here, by torch's fused AdamW, which is otherwise used on CUDA only.
"""

import math

import pytest

from nprf_vit.engine import optimizer, train_loop, transfer
from nprf_vit.engine.build import build_training
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.errors import RunError

from .running import ONE, assert_same_end, run_here, same, small_config
from .test_nonfinite import poison, records


@pytest.fixture
def gated(monkeypatch):
    monkeypatch.setattr(optimizer, 'FUSED_DEVICES', ('cuda', 'cpu'))


def test_who_gates(gated, scans):
    def gates(**changes):
        return build_training(small_config(**{**scans, **changes}), ONE, synthetic=True).gates_on_device

    assert gates() and gates(rel_pos_lr_scale=3.0, layer_decay=0.7)
    assert not gates(opt='lamb') and not gates(amp=True, amp_dtype='float16')
    optimizer.FUSED_DEVICES = ('cuda',)
    assert not gates()


def test_the_host_reads_a_step_while_the_next_is_under_way(gated, scans, tmp_path, monkeypatch):
    order = []
    compute, read = train_loop.compute_gradients, transfer.HostCopy.read

    def noted_compute(run, batches, step, clock):
        order.append(f'gradients {step}')
        return compute(run, batches, step, clock)

    def noted_read(self):
        order.append('read')
        return read(self)

    monkeypatch.setattr(train_loop, 'compute_gradients', noted_compute)
    monkeypatch.setattr(transfer.HostCopy, 'read', noted_read)
    run_here(tmp_path, **{**scans, 'epochs': 1, 'warmup_epochs': 0})
    steps = [f'gradients {step}' for step in range(5)]
    assert order == [steps[0], steps[1], 'read', steps[2], 'read', steps[3], 'read', steps[4], 'read', 'read']


@pytest.mark.parametrize('stop_at', [1, 4, 5, 6])
def test_stopped_and_continued(gated, scans, tmp_path, stop_at):
    run_here(tmp_path / 'whole', **scans)
    assert run_here(tmp_path / 'out', stop_at=stop_at, **scans) is None
    assert read_checkpoint(tmp_path / 'out' / 'last.pt')['step'] == stop_at
    run_here(tmp_path / 'out', resume='auto', **scans)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


@pytest.mark.parametrize('what', ['loss', 'gradient'])
def test_a_step_is_skipped_by_the_device(gated, scans, tmp_path, monkeypatch, what):
    poison(monkeypatch, {3, 7}, what)
    last = run_here(tmp_path / 'whole', recovery_interval=1, checkpoint_hist=20, **scans)
    before, after = (read_checkpoint(tmp_path / 'whole' / f'last-{age}.pt') for age in (10, 9))
    assert (before['step'], after['step']) == (2, 3)
    for name in ('state_dict', 'state_dict_ema'):
        assert same(before[name], after[name]) == []
    assert same(before['optimizer']['state'], after['optimizer']['state']) == []
    assert all(math.isfinite(value) for value in (last['train_loss'], last['ema_loss']))
    assert [(record['step'], record['reason']) for record in records(tmp_path / 'whole')] == [(3, what), (7, what)]
    assert [row['skipped'] for row in read_rows(tmp_path / 'whole' / 'summary.csv')] == ['1', '1']
    run_here(tmp_path / 'out', stop_at=3, **scans)
    run_here(tmp_path / 'out', resume='auto', **scans)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


def test_too_many_in_a_row_end_the_run(gated, scans, tmp_path, monkeypatch):
    poison(monkeypatch, {2, 4, 5, 7, 8, 9})
    with pytest.raises(RunError, match='3 steps in a row up to step 9 .* last checkpoint is that of step 5'):
        run_here(tmp_path, max_skipped_steps=3, **scans)


def test_a_checkpoint_of_either_kind_continues_as_the_other(scans, tmp_path, monkeypatch):
    """What was written on a CPU continues on a GPU, and back: how the optimizer computes follows the device."""
    run_here(tmp_path, stop_at=3, **scans)
    for kinds, fused, stop_at in ((('cpu',), True, 6), (('cuda',), None, 8)):
        monkeypatch.setattr(optimizer, 'FUSED_DEVICES', kinds)
        assert run_here(tmp_path, resume='auto', stop_at=stop_at, **scans) is None
        content = read_checkpoint(tmp_path / 'last.pt')
        assert content['step'] == stop_at
        assert {group['fused'] for group in content['optimizer']['param_groups']} == {fused}
        assert {float(state['step']) for state in content['optimizer']['state'].values()} == {stop_at}
