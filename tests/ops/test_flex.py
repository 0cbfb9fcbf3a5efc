"""FlexAttention without compilation, on the CPU: the score_mod is right. The fused CUDA kernel is not run here."""

import pytest
import torch

from nprf_vit.ops import reference
from nprf_vit.ops.flex import flex_attention

from .compare import make_case


@pytest.mark.parametrize('shape', [{'grid_size': (7, 14)}, {'n': 37}, {'n': 37, 'causal': True}])
@pytest.mark.parametrize('std', [None, 2.0])
@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
def test_equals_the_oracle(shape, std):
    case = make_case(**shape, std=std, m=16, d=16, dtype=torch.float32)
    grid = case.grid_size or (1, case.v.shape[2])
    table = None if case.bias is None else case.bias.reshape(case.bias.shape[0], 2 * grid[0] - 1, 2 * grid[1] - 1)
    z = flex_attention(case.phi_q, case.phi_k, case.v, table, grid, case.causal, compiled=False)
    exact = [None if x is None else x.double() for x in (case.phi_q, case.phi_k, case.v, case.bias)]
    expected = reference.attention(*exact, grid_size=case.grid_size, causal=case.causal)
    torch.testing.assert_close(z.double(), expected, rtol=1e-4, atol=1e-5)
