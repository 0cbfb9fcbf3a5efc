"""The attention benchmark runs, and its peer computes the same attention. No clock is asserted here."""

import csv

import torch

from benchmarks import attention
from benchmarks.layer import plain_fft
from nprf_vit.ops import reference


def test_quick_run_writes_a_table_and_a_picture(tmp_path, capsys):
    attention.main(['--quick', '--output', str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / 'quick_attention.csv').open()))
    assert {r['contender'] for r in rows} >= {'sdpa', 'direct', 'fft', 'auto', 'plain fft'}
    assert all(float(r['seconds']) > 0 for r in rows if r['seconds'])
    assert all(float(r['peak_mb']) >= 0 for r in rows if r['peak_mb'])
    assert (tmp_path / 'quick_attention.png').stat().st_size > 10_000
    assert 'attention.csv' in capsys.readouterr().out


def test_the_plain_fft_is_this_attention():
    phi_q, phi_k = torch.rand(2, 1, 2, 15, 4)
    v, bias = torch.randn(1, 2, 15, 3), torch.randn(2, 5, 9)
    z = plain_fft(phi_q, phi_k, v, bias, (3, 5))
    expected = reference.attention(phi_q, phi_k, v, bias, grid_size=(3, 5))
    torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-5)
