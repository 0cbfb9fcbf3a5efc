"""Every image once; training, validation and the files on disk tell the same numbers."""

import json

import pytest
import torch
from torch import nn

from nprf_vit.data.batch import Batch
from nprf_vit.data.datasets.digits import Digits
from nprf_vit.engine import build
from nprf_vit.engine.build import build_evaluation, build_training
from nprf_vit.engine.eval_loop import evaluate
from nprf_vit.engine.model import build_model
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.engine.tasks.classification import Classification
from nprf_vit.engine.validate import validate
from nprf_vit.errors import InputError

from .running import ONE, assert_same_end, config_file, launch, run_here, small_config

METRICS = ('top1', 'top5', 'loss', 'ema_top1', 'ema_top5', 'ema_loss', 'images')


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    return folder, run_here(folder, epochs=1, warmup_epochs=0)


def test_validation_repeats_what_training_reported(trained, tmp_path, capsys):
    folder, row = trained
    config = small_config(epochs=1, warmup_epochs=0)
    metrics = validate(config, ONE, str(folder / 'last.pt'), str(tmp_path / 'v.json'))
    assert {k: metrics[k] for k in METRICS} == {k: row[k] for k in METRICS}
    written = json.loads((tmp_path / 'v.json').read_text(encoding='utf-8'))
    assert {k: written[k] for k in METRICS} == {k: row[k] for k in METRICS}
    assert written['model'] == 'nprf_deit_tiny' and written['provenance']['torch']
    table = capsys.readouterr().out
    assert f'{row["top1"]:.2f}' in table and 'nprf_deit_tiny (EMA)' in table
    best = validate(config, ONE, str(folder / 'best.pt'))
    assert best['top1'] == row['top1']


def test_two_ranks_report_what_they_trained_and_count_once(tmp_path):
    file = config_file(tmp_path, epochs=1, warmup_epochs=0, amp=True, amp_dtype='bfloat16')
    launch('train.py', '--config', file, '--output', tmp_path / 'out', processes=2)
    args = '--config', file, '--checkpoint', tmp_path / 'out' / 'last.pt', '--json', tmp_path / 'v.json'
    launch('validate.py', *args, processes=2)
    row = read_rows(tmp_path / 'out' / 'summary.csv')[-1]
    written = json.loads((tmp_path / 'v.json').read_text(encoding='utf-8'))
    assert {k: float(written[k]) for k in METRICS} == {k: float(row[k]) for k in METRICS}
    assert written['images'] == 360


def test_another_resolution_is_fitted_but_not_another_model(trained):
    folder, row = trained
    metrics = validate(small_config(img_size=12), ONE, str(folder / 'last.pt'))
    assert metrics['images'] == 360 and metrics['ema_loss'] != row['ema_loss']
    with pytest.raises(InputError, match='is a checkpoint of another model'):
        validate(small_config(img_size=12, num_classes=11), ONE, str(folder / 'last.pt'))


class Nearest(nn.Module):
    """Answers with the class whose mean image is nearest: known accuracy, no training."""

    def __init__(self):
        super().__init__()
        data = Digits('train')
        levels = torch.tensor(data.levels).float().flatten(1)
        targets = torch.tensor(data.targets.astype(int))
        self.register_buffer('means', torch.stack([levels[targets == c].mean(0) for c in range(10)]))

    def forward(self, x):
        return -torch.cdist(x.flatten(1), self.means)


def batches(size=64, skip=(), twice=()):
    data = Digits('validation')
    order = [i for i in range(len(data)) if i not in skip] + list(twice)
    for first in range(0, len(order), size):
        part = order[first : first + size]
        levels = torch.tensor(data.levels[part]).float()[:, None]
        yield Batch(levels, torch.tensor(data.targets[part].astype(int)), torch.tensor(part))


def test_metrics_against_a_plain_count():
    data = Digits('validation')
    model = Nearest()
    logits = model(torch.tensor(data.levels).float())
    targets = torch.tensor(data.targets.astype(int))
    task = Classification(small_config(), 10)
    metrics = evaluate({'': model, 'ema_': model}, batches(), task, ONE, 360)
    assert metrics['top1'] == pytest.approx(100 * (logits.argmax(-1) == targets).double().mean().item(), abs=1e-9)
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)
    assert metrics['top5'] == pytest.approx(100 * (ranks < 5).double().mean().item(), abs=1e-9)
    loss = nn.functional.cross_entropy(logits.double(), targets).item()
    assert metrics['loss'] == pytest.approx(loss, abs=1e-6)
    assert metrics['ema_top1'] == metrics['top1'] and metrics['images'] == 360
    small = evaluate({'': model}, batches(7), task, ONE, 360)
    assert small['top1'] == metrics['top1']


@pytest.mark.parametrize('wrong', [{'skip': (5,)}, {'twice': (5,)}, {'skip': (5,), 'twice': (6,)}])
def test_an_image_missed_or_doubled_is_noticed(wrong):
    task = Classification(small_config(), 10)
    with pytest.raises(AssertionError, match='never|more than once'):
        evaluate({'': Nearest()}, batches(**wrong), task, ONE, 360)


def test_training_mode_is_put_back():
    model = Nearest().train()
    evaluate({'': model}, batches(), Classification(small_config(), 10), ONE, 360)
    assert model.training


def test_real_labels(tmp_path):
    """ReaL labels: several right answers, images without any left out."""
    root, data = tmp_path / 'data', Digits('validation')
    names, labels = [], []
    for index in range(40):
        digit = int(data.targets[index * 9])
        folder = root / 'val' / f'{digit}'
        folder.mkdir(parents=True, exist_ok=True)
        names.append(f'ILSVRC2012_val_{index + 1:08d}.JPEG')
        data[index * 9][0].save(folder / names[-1], quality=95)
        labels.append([] if index < 4 else list(range(10)) if index < 30 else [digit])
    (tmp_path / 'real.json').write_text(json.dumps(labels), encoding='utf-8')
    weights = tmp_path / 'w'
    run_here(weights, epochs=1, warmup_epochs=0, model_ema=False)
    keys = {'dataset': '', 'data_dir': str(root), 'real_labels': str(tmp_path / 'real.json'), 'model_ema': False}
    metrics = validate(small_config(**keys), ONE, str(weights / 'best.pt'))
    assert metrics['images'] == 40 and metrics['real_images'] == 36
    assert metrics['real_top1'] >= 100 * 26 / 36
    (tmp_path / 'real.json').write_text(json.dumps(labels[:-1]), encoding='utf-8')
    with pytest.raises(InputError, match='not as many as the 40 validation images'):
        validate(small_config(**keys), ONE, str(weights / 'best.pt'))


def test_no_weights_is_an_error():
    with pytest.raises(InputError, match='no weights for nprf_deit_tiny: give --checkpoint'):
        validate(small_config(), ONE)


def test_part_of_the_images_evenly_spread(tmp_path):
    assert run_here(tmp_path / 'part', epochs=1, warmup_epochs=0, val_limit=90)['images'] == 90
    config = small_config(val_limit=90)
    part = build_evaluation(config, ONE, build_model(config))
    assert list(part.batches.dataset.source.indices) == list(range(0, 360, 4))
    more = small_config(val_limit=1000)
    assert build_evaluation(more, ONE, build_model(more)).num_images == 360  # all there are
    with pytest.raises(InputError, match='val_limit needs images by index and no real_labels'):
        build_evaluation(small_config(val_limit=90, real_labels='bundled'), ONE, build_model(config))


def test_images_as_bytes_up_to_the_device_change_nothing(scans, tmp_path, monkeypatch):
    """On CUDA the workers send bytes and the device normalizes; here the CPU is told to do the same."""
    run_here(tmp_path / 'floats', **scans)
    monkeypatch.setattr(build, 'NORMALIZING_DEVICES', ('cpu',))
    run_here(tmp_path / 'bytes', workers=1, **scans)
    assert_same_end(tmp_path / 'floats', tmp_path / 'bytes')
    assert build_training(small_config(**scans), ONE).task.normalize is not None
