"""Models of pixels through the same training and evaluation: bits per dimension, schedule, spans, exact resume."""

import json
import math

import numpy as np
import pytest
import torch

from nprf_vit.config.yaml_file import dump_config, make_config
from nprf_vit.data.batch_plan import plan_batches
from nprf_vit.data.fixed_length_epochs import FixedLengthBatches
from nprf_vit.data.sample_order import SampleOrder, TrainBatches
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.lr_schedule import InverseSqrtLR
from nprf_vit.engine.tasks.pixel import PixelLikelihood
from nprf_vit.engine.train import train
from nprf_vit.engine.validate import validate
from nprf_vit.errors import InputError
from tests.engine.running import ONE, launch, same, without_timing

# three epochs of 5 steps over 1437 digits: a pass is 11 steps, so passes and epochs end apart
SMALL = {
    'task': 'pixel',
    'model': 'nprf_pixel_imagenet32',
    'model_kwargs': {'levels': 17, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'feature_dim': 4, 'mlp_ratio': 2},
    'img_size': 8,
    'in_chans': 1,
    'drop': 0.1,
    'dataset': 'digits',
    'workers': 0,
    'global_batch': 128,
    'batch_size': 64,
    'epochs': 3,
    'epoch_steps': 5,
    'warmup_epochs': 1,
    'sched': 'inverse_sqrt',
    'opt_betas': [0.9, 0.98],
    'lr': 3e-3,
    'eval_metric': 'bpd',
    'log_interval': 4,
    'model_ema': True,
    'model_ema_decay': 0.9,
}


def config(**changes):
    return make_config({**SMALL, **changes})


def state(folder):
    content = read_checkpoint(folder / 'last.pt')
    content['history'], content['best'] = without_timing(content['history']), without_timing([content['best']])
    return content


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    train(config(), ONE, folder)
    return folder


@pytest.mark.parametrize('stop_at', [3, 5, 12])
def test_stopped_run_ends_the_same(whole, tmp_path, stop_at):
    train(config(), ONE, tmp_path, None, lambda step: step >= stop_at)
    assert read_checkpoint(tmp_path / 'last.pt')['step'] == stop_at
    assert train(config(), ONE, tmp_path, 'auto')['step'] == 15
    assert same(state(whole), state(tmp_path)) == []


def test_validate_repeats_the_numbers_and_names_the_data(whole, tmp_path, capsys):
    metrics = validate(config(), ONE, str(whole / 'last.pt'), str(tmp_path / 'out.json'))
    row = read_checkpoint(whole / 'last.pt')['history'][-1]
    for name in ('bpd', 'bpd_se', 'ema_bpd', 'loss', 'images'):
        assert metrics[name] == row[name]
    said = capsys.readouterr().out
    assert 'on digits (scikit-learn' in said and 'bits/dim' in said and f'{row["bpd"]:.4f}' in said
    assert json.loads((tmp_path / 'out.json').read_text())['dataset'] == 'digits'
    assert row['bpd'] < math.log2(17)


def test_two_processes_count_the_same(whole, tmp_path):
    (tmp_path / 'run.yaml').write_text(dump_config(config()))
    args = '--config', tmp_path / 'run.yaml', '--checkpoint', whole / 'last.pt', '--json', tmp_path / 'two.json'
    launch('validate.py', *args, processes=2)
    two, row = json.loads((tmp_path / 'two.json').read_text()), state(whole)['history'][-1]
    assert two['images'] == 360
    assert two['bpd'] == pytest.approx(row['bpd'], abs=1e-6) and two['bpd_se'] == pytest.approx(row['bpd_se'], abs=1e-6)


def test_accumulation_is_the_same_batch(tmp_path):
    rows = []
    for batch_size in (128, 32):
        given = config(batch_size=batch_size, drop=0.0, epochs=2)
        rows.append(train(given, ONE, tmp_path / str(batch_size))['bpd'])
    assert rows[0] == pytest.approx(rows[1], abs=1e-5)


def test_dry_run(tmp_path):
    (tmp_path / 'run.yaml').write_text(dump_config(config(workers=0)))
    assert 'images/s on synthetic images' in launch('train.py', '--config', tmp_path / 'run.yaml', '--dry-run').stdout


def test_bits_are_those_of_the_definition():
    task, rng = PixelLikelihood(), np.random.default_rng(0)
    logits = rng.normal(size=(7, 12, 5)) * 3
    bytes_ = rng.integers(5, size=(7, 12))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    bits = -np.log2(np.take_along_axis(p, bytes_[..., None], -1))[..., 0].sum(1) / 12
    totals = {}
    for part in (slice(0, 3), slice(3, 7)):  # two batches of different size
        x, y = torch.tensor(logits[part]), torch.tensor(bytes_[part], dtype=torch.uint8)
        for name, value in task.measure(x, y, None).items():
            assert value.dtype == torch.float64
            totals[name] = totals.get(name, 0.0) + float(value)
    got = task.summarize(totals, 7)
    assert got['bpd'] == pytest.approx(bits.mean(), abs=1e-6)
    assert got['bpd_se'] == pytest.approx(bits.std(ddof=1) / math.sqrt(7), abs=1e-6)
    assert got['loss'] == pytest.approx(bits.mean() * math.log(2), abs=1e-6)
    assert float(task.loss(torch.tensor(logits), torch.tensor(bytes_))) == pytest.approx(got['loss'], abs=1e-6)
    assert task.is_better(3.0, 4.0) and not task.is_better(4.0, 3.0)


def test_uniform_guesses_cost_eight_bits():
    task = PixelLikelihood()
    totals = task.measure(torch.zeros(2, 3072, 256), torch.randint(256, (2, 3072), dtype=torch.uint8), None)
    got = task.summarize({name: float(value) for name, value in totals.items()}, 2)
    assert got['bpd'] == pytest.approx(8, abs=1e-6) and got['bpd_se'] == pytest.approx(0, abs=1e-6)


def test_inverse_square_root():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = InverseSqrtLR(optimizer, warmup_steps=100, warmup_lr=0.1)
    rates = []
    for step in (0, 50, 100, 400, 10_000):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]['lr'])
    assert rates == pytest.approx([0.1, 0.3, 0.5, 0.25, 0.05])


@pytest.mark.parametrize(('steps', 'micro'), [(5, 4), (11, 8), (30, 2), (3, 8)])
def test_spans_run_through_the_passes(steps, micro):
    order, plan = SampleOrder(45, 8, seed=1), plan_batches(8, 1, micro)  # a pass has 5 steps
    plain, spans = TrainBatches(order, plan), FixedLengthBatches(order, plan, 0, steps)
    expected = []
    for number in range(12):
        plain.start(number, 0)
        expected += list(plain)
    got = []
    for epoch in range(60 // steps):
        spans.start(epoch, 0)
        got += list(spans)
    assert got == expected[: len(got)] and len(got) == 60 // steps * steps * plan.accumulation
    spans.start(1, steps - 1)
    assert list(spans) == got[(2 * steps - 1) * plan.accumulation : 2 * steps * plan.accumulation]


@pytest.mark.parametrize('name', ['chrabaszcz', 'vandenoord'])
def test_reports_name_the_version(name):
    given = make_config({**SMALL, 'dataset': f'imagenet32_{name}'})
    table = PixelLikelihood.results_table(given, {'bpd': 3.7, 'bpd_se': 0.01, 'images': 5})
    versions = {'chrabaszcz': 'Chrabaszcz et al. 2017', 'vandenoord': 'van den Oord et al. 2016'}
    assert [text in table for text in (versions.pop(name), *versions.values())] == [True, False]
    assert 'the paper has 3.68 on ImageNet32 and does not say which version' in table


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'eval_metric': 'top1'}, 'task pixel has no eval_metric top1: expected bpd, loss'),
        ({'mixup': 0.8}, 'mixup 0.8 means nothing to task pixel'),
        ({'hflip': 0.0}, 'hflip 0.0 means nothing to task pixel'),
        ({'num_classes': 10}, 'num_classes 10 means nothing'),
        ({'task': 'classification', 'eval_metric': 'bpd'}, 'task classification has no eval_metric bpd'),
        ({'warmup_epochs': 0}, 'inverse_sqrt falls from the end of its warm-up'),
        ({'model': 'nprf_deit_tiny', 'model_kwargs': {'patch_size': 2}}, 'nprf_deit_tiny is for task classification'),
        ({'task': 'classification', 'eval_metric': 'top1'}, 'nprf_pixel_imagenet32 is for task pixel'),
        ({'img_size': 9}, 'images of 8x8 with 1 channels, the model takes 9x9 with 1'),
        ({'model_kwargs': {'levels': 16}}, r'has bytes up to 16, the model levels 0..15'),
    ],
)
def test_bad_configurations(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        train(config(**changes), ONE, tmp_path)
