"""The approximation benchmark runs, and its formulas are those of the features in the package."""

import csv
import math

import pytest
import torch

from experiments import approximation as bench


def test_quick_run_writes_tables_and_a_picture(tmp_path, capsys):
    bench.main(['--quick', '--output', str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / 'quick_approximation.csv').open()))
    assert {r['kind'] for r in rows} == set(bench.KINDS)
    assert all(0 < float(r['low']) <= float(r['median']) <= float(r['high']) for r in rows)
    assert len(list(csv.DictReader((tmp_path / 'quick_approximation_variance.csv').open()))) == 4
    assert len(list(csv.DictReader((tmp_path / 'quick_approximation_samples.csv').open()))) == 2
    assert (tmp_path / 'quick_approximation.png').stat().st_size > 10_000
    assert 'approximation.png' in capsys.readouterr().out


@pytest.mark.parametrize(('kind', 'shift'), [('prf', 0.0), ('prf', 1.5), ('trf', 0.0)])
def test_the_predicted_variance_is_the_measured_one(kind, shift):
    q, k = bench.draw_tokens(0.5, 1, seed=0)
    predicted = bench.relative_variance(q, k, kind).item()
    assert bench.measured_variance(q, k, kind, 1 << 15, shift) == pytest.approx(predicted, rel=0.1)


def test_shifted_draws_reach_variances_that_plain_ones_miss():
    q, k = bench.draw_tokens(3.0, 1, seed=0)
    predicted = bench.relative_variance(q, k, 'prf').item()
    assert bench.measured_variance(q, k, 'prf', 1 << 15, 1.5) == pytest.approx(predicted, rel=0.3)
    assert bench.measured_variance(q, k, 'prf', 1 << 15, 0.0) < 0.01 * predicted


def test_the_error_falls_with_features_and_grows_with_the_norm():
    def median(radius, m):
        return torch.tensor([bench.row_error(radius, 64, 'prf', m, seed) for seed in range(9)]).median()

    assert median(1.0, 256) < median(1.0, 8) < median(3.0, 8) <= 2


def test_the_sample_size_holds():
    m = math.ceil(bench.enough_features(bench.mean_relative_variance(0.5, 64)))
    failed = sum(bench.row_error(0.5, 64, 'prf', m, seed) > bench.ERROR for seed in range(50))
    assert failed <= bench.FAILURE * 50


def test_tokens_and_projections_are_independent():
    q, k = bench.draw_tokens(1.0, 64, seed=3)
    w = bench.draw_projection(1, 8, bench.D, 'prf', torch.Generator().manual_seed(bench.PROJECTIONS + 3)).double()
    assert (w @ torch.cat([q, k], 1).transpose(-1, -2)).abs().max() < 5  # one of its own tokens would give 8


def test_theorem_3_makes_every_score_right_to_its_factor():
    """A union bound over keys by Chebyshev: the constants are those with which the proof goes through."""
    radius, keys = 0.7, 1024
    m, t = bench.enough_by_theorem_3(radius, keys), bench.ERROR / (2 + bench.ERROR)
    assert 2 * t / (1 - t) == pytest.approx(bench.ERROR)
    one_key = math.expm1(4 * radius**2) / (m * t**2)  # two tokens in one direction have the largest variance
    assert keys * one_key <= bench.FAILURE < keys * one_key * 1.2
    assert m / bench.enough_features(math.expm1(4 * radius**2)) == pytest.approx(keys, rel=0.2)
