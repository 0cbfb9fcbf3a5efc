"""The small language experiments: rows that are there are not run again, and the tables are what the files say."""

import pytest

from benchmarks.report import RESULTS
from experiments import language
from nprf_vit.engine.output.csv_file import read_rows

from ..examples.running import TINY, wikitext

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


@pytest.mark.parametrize('name', language.EXPERIMENTS)
def test_the_shipped_rows_are_of_known_variants(name):
    rows = read_rows(RESULTS / f'{name}.csv')
    assert {row['variant'] for row in rows} <= set(language.EXPERIMENTS[name].variants)
    assert len({(row['variant'], row['seed']) for row in rows}) == len(rows)
