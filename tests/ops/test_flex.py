"""FlexAttention without compilation, on the CPU: the score_mod is right. The fused CUDA kernel is not run here."""

import pytest
import torch

from nprf_vit.ops import reference
from nprf_vit.ops.backends.flex import flex_attention

from .compare import make_case, table_shape


def run(case):
    grid = case.grid_size or (1, case.v.shape[2])
    table = None if case.bias is None else case.bias.reshape(case.bias.shape[0], 2 * grid[0] - 1, 2 * grid[1] - 1)
    return flex_attention(case.phi_q, case.phi_k, case.v, table, grid, case.causal, compiled=False)


@pytest.mark.parametrize('shape', [{'grid_size': (7, 14)}, {'n': 37}, {'n': 37, 'causal': True}])
@pytest.mark.parametrize('std', [None, 2.0])
@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
def test_equals_the_oracle(shape, std):
    case = make_case(**shape, std=std, m=16, d=16, dtype=torch.float32)
    z = run(case)
    exact = [None if x is None else x.double() for x in (case.phi_q, case.phi_k, case.v, case.bias)]
    expected = reference.attention(*exact, grid_size=case.grid_size, causal=case.causal)
    torch.testing.assert_close(z.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('shape', [{'grid_size': (7, 14)}, {'n': 37, 'causal': True}])
@pytest.mark.parametrize('constant', [1e5, -1e5])
@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
def test_a_constant_bias_is_no_bias(shape, constant):
    case = make_case(**shape, std=None, m=16, d=16, dtype=torch.float32)
    expected = run(case)
    case.bias = torch.full((2, *table_shape(case.v.shape[2], case.grid_size)), constant)
    if case.causal:  # what nobody sees counts for nothing
        case.bias[:, case.v.shape[2] :] = 1e9
    torch.testing.assert_close(run(case), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
def test_zero_keys_get_no_weight():
    """Their gradients are not run here: FlexAttention has none on the CPU."""
    case = make_case(37, m=16, d=16, dtype=torch.float32)
    case.phi_k[:, :, 5:9] = 0
    torch.testing.assert_close(run(case), case.run('direct'), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('scale', [1e-25, 1e-35, 1e12])
@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
def test_small_and_large_features_keep_their_products(scale):
    case = make_case(37, std=2.0, m=16, d=16, dtype=torch.float32)
    expected = run(case)
    case.phi_q, case.phi_k = case.phi_q * scale, case.phi_k * scale
    torch.testing.assert_close(run(case), expected, rtol=1e-4, atol=1e-5)
