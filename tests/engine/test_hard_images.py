"""The hardest images of the last evaluation: those with the largest losses, and the pairs that are confused."""

import json

import pytest
import torch
import torch.nn.functional as F

from nprf_vit.engine.hard_images import Answer, HardImages, confused_pairs
from nprf_vit.engine.tasks.classification import Classification
from tests.engine.running import ONE, run_here, small_config

SHORT = {'global_batch': 512, 'warmup_epochs': 0, 'epochs': 1}


def test_worst_first_and_all_that_are_wrong():
    torch.manual_seed(0)
    logits, targets = torch.randn(200, 10), torch.randint(10, (200,))
    hard = HardImages(Classification(small_config(), 10))
    for part in torch.arange(200).split(64):
        hard.observe('', logits[part], targets[part], part)
        hard.observe('ema_', -logits[part], targets[part], part)
    answers = hard.gather(ONE)
    losses = F.cross_entropy(logits, targets, reduction='none')
    assert [a.index for a in answers[:16]] == losses.argsort(descending=True)[:16].tolist()
    assert {a.index for a in answers} >= set((logits.argmax(1) != targets).nonzero().flatten().tolist())
    assert answers[0].p == pytest.approx(logits.softmax(1)[answers[0].index].max().item())
    pairs = confused_pairs(answers)
    target, predicted, count, case = pairs[0]
    wrong = (targets == target) & (logits.argmax(1) == predicted)
    assert count == wrong.sum() and count == max(pair[2] for pair in pairs)
    assert case.index == (losses * wrong).argmax(), 'the clearest case of a pair'


def test_a_loss_that_is_no_number_is_the_worst():
    assert sorted([Answer(1, 3.0), Answer(2, float('nan')), Answer(0, 3.0)], key=Answer.rank)[0].index == 2


def test_the_last_evaluation_of_a_run_is_noted(tmp_path):
    row = run_here(tmp_path, **SHORT)
    found = json.loads((tmp_path / 'validation.json').read_text())
    assert len(found['worst']) == 16 and found['model'] == '' and found['unit'] == 'loss'
    assert found['worst'][0]['picture'].startswith('data:image/png')
    assert found['worst'][0]['loss'] > row['loss']
    assert sum(pair['count'] for pair in found['confused']) <= round(360 * (1 - row['top1'] / 100))


def test_a_task_that_has_no_such_numbers_is_left_out(tmp_path, monkeypatch, capsys):
    def fails(self, logits, targets):
        raise IndexError('no classes here')

    monkeypatch.setattr(Classification, 'per_image', fails)
    assert run_here(tmp_path, **SHORT)['epoch'] == 1
    assert not (tmp_path / 'validation.json').exists() and (tmp_path / 'report.html').exists()


def test_a_report_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    from nprf_vit.engine import train

    def fails(folder):
        raise KeyError('a mistake\nin two lines')

    monkeypatch.setattr(train, 'write_report', fails)
    assert run_here(tmp_path, **SHORT)['epoch'] == 1
    assert [line for line in capsys.readouterr().out.splitlines() if 'report.html' in line] == [
        f"no {tmp_path / 'report.html'}: KeyError: 'a mistake\\nin two lines'"
    ]
