"""What the backends are timed beside computes the same attention."""

import pytest
import torch

from nprf_vit.diagnosis import peers
from nprf_vit.ops import kernel_attention


@pytest.mark.parametrize('scratch', [512 << 20, 1])
def test_the_fft_product_is_the_attention(scratch):
    """All features at once, and one after the other."""
    torch.manual_seed(0)
    phi_q, phi_k, v = torch.rand(2, 3, 20, 5), torch.rand(2, 3, 20, 5), torch.randn(2, 3, 20, 4)
    bias = torch.randn(3, 7, 9) * 0.3
    expected = kernel_attention(phi_q, phi_k, v, bias, grid_size=(4, 5))
    z = peers.fft_attention(phi_q, phi_k, v, bias, (4, 5), scratch)
    torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-5)
