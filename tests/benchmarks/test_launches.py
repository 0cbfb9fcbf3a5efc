"""Limits on launches per layer, counted on fake CUDA tensors."""

import pytest

from benchmarks.launches import LIMITS, audit

pytest.importorskip('triton')


def test_few_launches_and_no_host_reads():
    rows = audit(['fused', 'fused window', 'direct'], {(14, 14): 128, (32, 32): 8, (64, 64): 1})
    assert len(rows) == 18
    for row in rows:
        limit = LIMITS[row.backend][row.direction == 'backward']
        assert row.launches <= limit, row
        assert row.host_reads == 0 and row.largest_mb <= 512, row


def test_a_host_read_is_noticed():
    rows = audit(['fft'], {(4, 4): 1})
    assert any(row.host_reads for row in rows)
