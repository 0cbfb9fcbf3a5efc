"""Dense products between two sequences, without a bias: queries against all keys in tiles. O(N·L(M+D)) time.

# B batch, K heads, N queries, L keys, M features, D head dim
"""

from collections.abc import Iterator

import torch

from ..bias import BiasGradients
from .interface import Gradients, Inputs, Sums

_TILE = 1 << 20  # scores at once: 4 MB


def forward(inputs: Inputs) -> Sums:
    """Numerators Σ_j s_ij v_j (B, K, N, D) and denominators Σ_j s_ij (B, K, N), s_ij = φq_i·φk_j."""
    phi_q, phi_k, v, _ = inputs
    num, den = v.new_empty(*phi_q.shape[:3], v.shape[-1]), v.new_empty(phi_q.shape[:3])
    for t in _tiles(inputs):
        scores = phi_q[:, :, t] @ phi_k.transpose(-1, -2)  # B, K, t, L
        num[:, :, t], den[:, :, t] = scores @ v, scores.sum(-1)
    return Sums(num, den)


def backward(inputs: Inputs, grad: torch.Tensor) -> Gradients:
    """Given grad (B, K, N, D+1) of numerators and denominators; scores are computed again."""
    phi_q, phi_k, v, _ = inputs
    d_q, d_k, d_v = torch.empty_like(phi_q), torch.zeros_like(phi_k), torch.zeros_like(v)
    for t in _tiles(inputs):
        g_num, g_den = grad[:, :, t, :-1], grad[:, :, t, -1:]
        scores = phi_q[:, :, t] @ phi_k.transpose(-1, -2)  # B, K, t, L
        d_v += scores.transpose(-1, -2) @ g_num
        d_scores = g_num @ v.transpose(-1, -2) + g_den
        d_q[:, :, t] = d_scores @ phi_k
        d_k += d_scores.transpose(-1, -2) @ phi_q[:, :, t]
    return Gradients(d_q, d_k, d_v, BiasGradients())


def _tiles(inputs: Inputs) -> Iterator[slice]:
    batch, heads, n, _ = inputs.phi_q.shape
    step = max(1, _TILE // max(1, batch * heads * inputs.phi_k.shape[2]))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
