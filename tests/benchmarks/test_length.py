"""The benchmark of cost against length runs, fits, and says what does not fit. No clock is asserted here."""

import csv

import numpy as np
import pytest

from benchmarks import length, measure


@pytest.fixture
def one_size(monkeypatch):
    monkeypatch.setattr(length, 'QUICK', [length.Panel('grid, forward', (6, 9), (4,), grid=True, trials=2)])


def test_quick_run_writes_tables_and_a_picture(tmp_path, capsys):
    length.main(['--quick', '--output', str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / 'quick_length.csv').open()))
    assert {r['panel'] for r in rows} == {panel.name for panel in length.FULL}
    assert {r['contender'] for r in rows} == {length.SDPA, length.STORED, *length.BACKENDS}
    assert all(float(r['seconds']) >= float(r['fastest']) > 0 and float(r['peak_mb']) >= 0 for r in rows)
    assert len(list(csv.DictReader((tmp_path / 'quick_length_exponents.csv').open()))) == 8 + 5 + 5
    assert (tmp_path / 'quick_length.png').stat().st_size > 10_000
    assert '| n (quick run, not a result) | 256 | 1024 |' in capsys.readouterr().out


def test_a_contender_that_does_not_fit_is_said_to(one_size, tmp_path, monkeypatch):
    def refuse():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(length.Layer, 'softmax_stored', lambda layer: refuse)
    length.main(['--quick', '--output', str(tmp_path)])
    for r in csv.DictReader((tmp_path / 'quick_length.csv').open()):
        assert (r['seconds'] == r['peak_mb'] == measure.NO_FIT) == (r['contender'] == length.STORED)


def test_other_errors_are_not_mistaken_for_memory(one_size, monkeypatch):
    def fail(run):
        raise RuntimeError('shapes do not match')

    monkeypatch.setattr(measure, 'peak_memory', fail)
    with pytest.raises(RuntimeError, match='shapes'):
        length.main(['--quick'])


def test_the_memory_limit_is_enforced_and_taken_back():
    with measure.memory_limit(0.5), pytest.raises(MemoryError):
        np.empty(2**27)
    np.empty(2**27)


def test_exponents_of_known_curves():
    rows = [
        {'panel': 'p', 'contender': 'c', 'm': '', 'n': n, 'seconds': f'{1e-9 * n**2}', 'peak_mb': f'{3.0 * n}'}
        for n in (1000, 8000, 16000, 32000)
    ]
    rows[0]['seconds'] = '5.0'  # below the start of the fit
    (fit,) = length.exponents(rows, 8000)
    assert (fit['time'], fit['memory']) == ('2.00', '1.00')
