"""Tokens before the grid, whose part of the sums is added to the kernels' by the logarithms of denominators."""

import pytest
import torch

from nprf_vit.ops.kernels import launch
from tests.ops.test_prefix import check, make

# as in cases.py, and what logarithms of float32 add
OUTPUT, GRADIENT = 1e-5, 2e-5


@pytest.mark.parametrize('kind', ['5x6', '1x1', 'window', 'none'])
def test_kinds_of_bias(kind):
    case = make(2, '5x6' if kind == 'none' else kind, std=None if kind == 'none' else 0.5, m=8, d=16)
    check(case, 'fused', OUTPUT, GRADIENT)


def test_wide_biases():
    """The kernels scale each row by itself then; gradients go through logarithms."""
    check(make(2, std=30.0, prefix_std=30.0, m=8, d=16), 'fused', 1e-3, 2e-3)


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16])
def test_half_precision(half):
    case = make(1, m=8, d=16)
    case.v = case.v.to(half)
    check(case, 'fused', 16 * torch.finfo(half).eps, 16 * torch.finfo(half).eps)


@pytest.mark.parametrize('kind', ['5x6', 'window'])
def test_without_trust_plain_pytorch_computes_the_same(kind, monkeypatch):
    case = make(2, kind, m=8, d=16)
    with launch.recorded() as launches:
        monkeypatch.setenv('NPRF_VIT_FUSED', '0')
        check(case, 'fused', OUTPUT, GRADIENT)
    assert launches == []
