"""Limits on launches per layer, counted on fake CUDA tensors."""

import json

import pytest
import torch

from benchmarks import launches
from benchmarks.launches import LIMITS, SIZES, audit, count
from nprf_vit.ops.backends import batched, direct
from nprf_vit.ops.backends.interface import Inputs
from nprf_vit.ops.bias import Bias
from tests.fake_cuda import needs_fake_cuda

pytest.importorskip('triton')


@needs_fake_cuda
def test_few_launches_and_no_host_reads():
    rows = audit(['fused', 'fused window', 'direct', 'window', 'fft', 'cells'], SIZES)
    assert len(rows) == 6 * 4 * 2
    for row in rows:
        if row.grid == '128x128' and row.backend in ('direct', 'fft'):
            continue
        limit = LIMITS[row.backend][row.direction == 'backward']
        assert row.launches <= limit, row
        assert row.host_reads == 0 and row.largest_mb <= 512, row


@needs_fake_cuda
def test_cells_of_equal_size_need_no_indices():
    rows = audit(['cells'], {(28, 28): 1, (112, 112): 1})
    assert [(row.launches, row.host_reads) for row in rows] == [(20, 0), (47, 0)] * 2


@needs_fake_cuda
def test_the_dense_plain_path_at_128x128_is_near_what_512_mb_allow():
    """12.9 GB of scores pass through 512 MB: 24 chunks, each of which takes two products and one multiplication."""
    chunks = 12 * 4 * 128**4 / batched.SCRATCH
    assert chunks == 24
    forward, backward = audit(['direct'], {(128, 128): 1})
    assert 2 * chunks > LIMITS['direct'][0]  # the products alone are more than 40
    assert forward.launches <= 3 * chunks + 16 and backward.launches <= 2 * 10 * chunks + 40
    assert forward.largest_mb <= 512 and backward.largest_mb <= 512 and not forward.host_reads


def test_a_host_read_is_noticed():
    """`direct` as the CPU runs it looks at the bias."""
    with launches.FakeTensorMode():
        phi, v = torch.empty(1, 2, 16, 8, device='cuda'), torch.empty(1, 2, 16, 4, device='cuda')
        inputs = Inputs(phi, phi, v, Bias(torch.empty(2, 7, 7, device='cuda')))
        assert count(lambda: direct.forward(inputs, (4, 4), False, torch.float32))[1] == 1


@needs_fake_cuda
def test_what_is_counted():
    with launches.FakeTensorMode():
        x = torch.empty(256, 1024, device='cuda')
        assert count(lambda: x.view(-1)[3:]) == (0, 0, 1.0, 0.0)
        assert count(lambda: (x + 1) * 2) == (2, 0, 1.0, 2.0)
        assert count(lambda: torch.nn.functional.pad(x, (0, 1)))[0] == 2


@needs_fake_cuda
def test_the_command_writes_every_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launches, 'SIZES', {(14, 14): 2})
    launches.main(['--json', str(tmp_path / 'rows.json')])
    rows = json.loads((tmp_path / 'rows.json').read_text())
    assert {row['backend'] for row in rows} == set(launches.ALL)
    assert {'SDPA, no bias', 'FlexAttention', 'softmax with a bias, eager'} <= {row['backend'] for row in rows}
    assert 'alive MB' in capsys.readouterr().out
