"""The expressiveness benchmark runs, and its certificate is right where the answer is known."""

import csv

import pytest
import torch
from tqdm import tqdm

from experiments import expressiveness as bench


def test_quick_run_writes_tables_and_a_picture(tmp_path, capsys):
    bench.main(['--quick', '--output', str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / 'quick_expressiveness.csv').open()))
    for r in rows:
        reached = float(r['least_log_distance']) < 1e-10
        assert (r['expressible'] == 'yes') == reached == (float(r['mean_row_error']) < 1e-10)
    kernel = list(csv.DictReader((tmp_path / 'quick_expressiveness_kernel.csv').open()))
    assert all(int(r['rank_without_bias']) == int(r['m']) < int(r['rank_with_bias']) for r in kernel)
    assert (tmp_path / 'quick_expressiveness.png').stat().st_size > 10_000
    assert '| rank_of_bias |' in capsys.readouterr().out


@pytest.mark.parametrize('d', [1, 3])
def test_no_dot_product_comes_nearer_than_the_bound(d):
    target = bench.Target('normal', 10, None, bench.normal)
    (row,) = bench.dot_product_rows(target, [d], tqdm(disable=True))
    log_a = bench.centred(target.matrix())
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, 10, d, generator=generator, dtype=torch.float64)
        assert (log_a - bench.centred(q @ k.T)).norm() >= float(row['least_log_distance'])


def test_the_rank_of_a_dot_product_is_found():
    q, k = torch.randn(2, 30, 5, dtype=torch.float64)
    assert bench.rank(torch.linalg.svdvals(bench.centred(q @ k.T)), 30) == 5
    assert bench.rank(torch.linalg.svdvals((q @ k.T).softmax(-1).log()), 30) == 6


def test_the_squared_distance_is_a_dot_product():
    target = bench.Target('squared', 36, (6, 6), bench.squared_distance)
    (row,) = bench.dot_product_rows(target, [3], tqdm(disable=True))
    assert (row['rank_centred'], row['expressible']) == (3, 'yes')
