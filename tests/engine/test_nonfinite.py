"""Non-finite losses and gradients: no update from them, on no rank; written down; and an end when they do not end."""

import json
import math
from functools import partial

import pytest
import torch

from nprf_vit.data.sample_order import SampleOrder
from nprf_vit.engine import build
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.engine.tasks.classification import Classification
from nprf_vit.errors import RunError

from .running import assert_same_end, config_file, launch, run_here, same


class Steep(torch.autograd.Function):
    """The identity, with an infinite slope."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


def poison(monkeypatch, steps, what='loss'):
    """Steps (from 1) whose images are NaN, or whose gradients are infinite while the loss is not."""
    mix, loss, now = Classification.mix, Classification.loss, [0]

    def poisoned_mix(self, images, targets, step, epoch, slot):
        now[0] = step + 1
        images, targets = mix(self, images, targets, step, epoch, slot)
        return (images * math.nan if what == 'loss' and now[0] in steps else images), targets

    def poisoned_loss(self, logits, targets):
        return loss(self, Steep.apply(logits) if what == 'gradient' and now[0] in steps else logits, targets)

    monkeypatch.setattr(Classification, 'mix', poisoned_mix)
    monkeypatch.setattr(Classification, 'loss', poisoned_loss)


def records(folder):
    return [json.loads(line) for line in (folder / 'skipped_steps.jsonl').read_text(encoding='utf-8').splitlines()]


@pytest.mark.parametrize('what', ['loss', 'gradient'])
def test_the_step_is_skipped_counted_and_written_down(scans, tmp_path, monkeypatch, what):
    poison(monkeypatch, {3, 7}, what)
    last = run_here(tmp_path / 'whole', recovery_interval=1, checkpoint_hist=20, **scans)
    before, after = (read_checkpoint(tmp_path / 'whole' / f'last-{age}.pt') for age in (10, 9))  # of steps 2 and 3
    assert (before['step'], after['step']) == (2, 3)
    for name in ('state_dict', 'state_dict_ema'):
        assert same(before[name], after[name]) == []
    assert same(before['optimizer']['state'], after['optimizer']['state']) == []
    assert all(math.isfinite(value) for value in (last['train_loss'], last['ema_loss']))
    assert [row['skipped'] for row in read_rows(tmp_path / 'whole' / 'summary.csv')] == ['1', '1']
    found = records(tmp_path / 'whole')
    assert [(record['step'], record['reason']) for record in found] == [(3, what), (7, what)]
    order = SampleOrder(160, 32, 42, 2, 8)
    assert [record['images'] for record in found] == [order.epoch(e)[0][s].tolist() for e, s in ((0, 2), (1, 1))]
    assert found[0]['suspects'] == (found[0]['images'] if what == 'loss' else [])
    run_here(tmp_path / 'out', stop_at=3, **scans)
    run_here(tmp_path / 'out', resume='auto', **scans)
    assert records(tmp_path / 'out') == found
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


def test_the_loss_of_skipped_steps_alone_is_no_number(scans, tmp_path, monkeypatch):
    poison(monkeypatch, {6, 7, 8, 9, 10})
    run_here(tmp_path, **{**scans, 'log_interval': 5})
    for name, column in (('steps.csv', 'loss'), ('summary.csv', 'train_loss')):
        assert [math.isnan(float(row[column])) for row in read_rows(tmp_path / name)] == [False, True]


def test_too_many_in_a_row_end_the_run(scans, tmp_path, monkeypatch):
    poison(monkeypatch, {2, 4, 5, 7, 8, 9})
    with pytest.raises(RunError, match='3 steps in a row up to step 9 .* last checkpoint is that of step 5'):
        run_here(tmp_path, max_skipped_steps=3, **scans)
    assert read_checkpoint(tmp_path / 'last.pt')['step'] == 5
    assert [record['step'] for record in records(tmp_path)] == [2, 4, 5, 7, 8, 9]


def test_without_any_checkpoint_yet_one_is_written(scans, tmp_path, monkeypatch):
    poison(monkeypatch, {2, 3})
    with pytest.raises(RunError, match='the last checkpoint is that of step 3'):
        run_here(tmp_path, max_skipped_steps=2, **scans)
    weights = read_checkpoint(tmp_path / 'last.pt')['state_dict']
    assert all(value.isfinite().all() for value in weights.values())


def test_overflow_of_the_scaler_is_not_counted(scans, tmp_path, monkeypatch):
    poison(monkeypatch, {2, 3, 4, 5}, 'gradient')
    run_here(tmp_path, amp=True, amp_dtype='float16', max_skipped_steps=2, **scans)
    content = read_checkpoint(tmp_path / 'last.pt')
    assert content['skipped']['total'] == 0
    assert content['scaler']['scale'] == 65536 / 2**4  # each overflow halves it


def test_overflow_that_no_scale_explains_is_counted(scans, tmp_path, monkeypatch):
    poison(monkeypatch, set(range(1, 11)), 'gradient')
    small = partial(torch.amp.GradScaler, init_scale=0.5)
    monkeypatch.setattr(build, 'build_scaler', lambda config, device: small(device.type))
    with pytest.raises(RunError, match='4 steps in a row up to step 4'):
        run_here(tmp_path, amp=True, amp_dtype='float16', max_skipped_steps=4, **scans)


def test_all_ranks_skip_together(scans, tmp_path):
    """Rank 1 alone sees NaN in its second micro-batch of step 3."""
    file = config_file(tmp_path, **{**scans, 'batch_size': 8})
    launch('tests/engine/faulty.py', file, tmp_path / 'out', 'poison', 1, 3, processes=2)
    found = records(tmp_path / 'out')
    assert [(record['step'], record['reason']) for record in found] == [(3, 'loss')]
    images = found[0]['images']
    assert found[0]['suspects'] == images[24:]  # micro-batches: 8 of rank 0, 8 of rank 1, and again
    assert read_rows(tmp_path / 'out' / 'summary.csv')[0]['skipped'] == '1'
    assert all(value.isfinite().all() for value in read_checkpoint(tmp_path / 'out' / 'last.pt')['state_dict'].values())
