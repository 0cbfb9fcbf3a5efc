"""What the backends are timed beside: attention without a bias, and the product by FFT as a GPU would run it.

# B batch, K heads, N tokens, M features, D head dim, H×W grid; P×Q padded grid
"""

import torch
import torch.nn.functional as F

from nprf_vit.ops import toeplitz, toeplitz_matmul

_SCRATCH = 512 << 20


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's own, without a bias: q, k, v (B, K, N, D)."""
    return F.scaled_dot_product_attention(q, k, v)


def fft_attention(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    grid: tuple[int, int],
    scratch: int = _SCRATCH,
) -> torch.Tensor:
    """Σ_m φq_m T(φk_m ⊗ [v, 1]) in as few transforms as `scratch` bytes hold, in float32 whatever the bias.

    Off the CPU `backend='fft'` is a dense product, because an FFT must look at the bias first. This one does not look:
    it is here to be timed, with biases that it can hold.
    """
    values = F.pad(v, (0, 1), value=1.0)  # B, K, N, D+1
    c = (bias - bias.amax((1, 2), keepdim=True)).exp()
    p, q = toeplitz.padded_size(*grid)
    # of one feature: the products, their spectrum and its inverse at once
    size = 3 * 8 * p * (q // 2 + 1) * v.shape[0] * v.shape[1] * values.shape[-1]
    total = torch.zeros_like(values)
    for some_q, some_k in zip(*(x.split(max(1, scratch // size), dim=-1) for x in (phi_q, phi_k))):
        u = (some_k.unsqueeze(-1) * values.unsqueeze(-2)).flatten(-2)  # B, K, N, f·(D+1)
        y = toeplitz_matmul(c, u, grid).unflatten(-1, (-1, values.shape[-1]))  # B, K, N, f, D+1
        total += (some_q.unsqueeze(-1) * y).sum(-2)
    return total[..., :-1] / total[..., -1:]
