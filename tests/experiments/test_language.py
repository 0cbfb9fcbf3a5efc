"""The small language experiments: rows that are there are not run again, and the tables are what the files say."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.report import RESULTS
from experiments import language
from nprf_vit.engine.output.csv_file import read_rows

from ..examples.running import TINY, documents, wikitext

QUICK = {**TINY, 'steps': 2, 'length': 16, 'batch': 4, 'feature_dim': 4, 'cutoffs': '6,12'}


def test_rows_are_filled_in_once(tmp_path, monkeypatch):
    wikitext(tmp_path / 'text' / 'novels')
    args = 'language_model', tmp_path / 'text', tmp_path / 'results', tmp_path / 'work'
    table = language.fill(*args, seeds=1, quick=QUICK)
    variants = language.EXPERIMENTS['language_model'].variants
    rows = read_rows(tmp_path / 'results' / 'language_model.csv')
    assert [row['variant'] for row in rows] == list(variants) and not list((tmp_path / 'work').iterdir())
    assert [row['model'] for row in language.report('language_model', table)] == [name for name, _ in variants.values()]
    monkeypatch.setattr(language, 'run_one', None)
    language.fill(*args, seeds=1, quick=QUICK)


def test_the_best_without_context():
    """By hand: the mask is taken for the most frequent token, 5; what stands there is half the answer elsewhere."""

    class Task:
        settings = SimpleNamespace(vocabulary=7)
        data = {'train': np.array([[5, 5], [5, 6]]), 'valid': [0], 'test': [0]}  # counted once more: 4 and 2 of 11

        def batch_of(self, split, chosen, *seed):
            return (torch.tensor([[4, 6, 5, 6]]), torch.tensor([[5, 6, 6, -1]])), 3

    found = language.no_context(Task(), mask=4)
    assert found['test_accuracy'] == pytest.approx(200 / 3) and found['valid_tokens'] == 3
    assert found['test_loss'] == pytest.approx(-np.log([4 / 11, 0.5 + 1 / 11, 1 / 11]).mean())


def test_nothing_is_trained_without_context(tmp_path):
    documents(tmp_path / 'text' / 'novels')
    shutil.copy(tmp_path / 'text' / 'novels' / 'valid.txt', tmp_path / 'text' / 'novels' / 'test.txt')
    args = 'masked_language_model', tmp_path / 'text', tmp_path / 'results', tmp_path / 'work'
    quick = {**TINY, 'steps': 2, 'length': 16, 'batch': 4, 'feature_dim': 4, 'vocabulary': 60}
    rows = language.fill(*args, seeds=2, quick=quick).rows
    assert [row['seed'] for row in rows if row['variant'] == 'no_context'] == ['0'] and len(rows) == 9
    assert all(0 < float(row['test_accuracy']) < 100 for row in rows if row['variant'] == 'no_context')


@pytest.mark.parametrize('name', language.EXPERIMENTS)
def test_the_shipped_rows_are_of_known_variants(name):
    rows = read_rows(RESULTS / f'{name}.csv')
    assert {row['variant'] for row in rows} <= set(language.EXPERIMENTS[name].variants)
    assert len({(row['variant'], row['seed']) for row in rows}) == len(rows)
