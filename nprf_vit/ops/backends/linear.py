"""Products without bias, Φq(ΦkᵀV): O(N·M·E) time. docs/math.md, "Linear".

# B batch, K heads, N tokens, M features, E value columns, L tokens per chunk
"""

import torch
import torch.nn.functional as F

from ..bias import BiasGradients
from .interface import Backend, Case, Gradients, Grid, Inputs, Product, Sums, own_dtype

_CHUNK = 128  # causal: prefix states take N/L·M·E numbers, no more than the values themselves once L ≥ M


def forward(inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype) -> Sums:
    """Σ_j (φq_i·φk_j) [v_j, 1], over j ≤ i when causal; there must be no bias."""
    return split(product(inputs.phi_q, inputs.phi_k, with_ones(inputs.v), causal))


def backward(
    inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype, grad: torch.Tensor, bias_grad: bool
) -> Gradients:
    """Each gradient is again a linear product, of other arguments."""
    d_q, d_k, d_v = product_backward(inputs.phi_q, inputs.phi_k, with_ones(inputs.v), grad, causal)
    return Gradients(d_q, d_k, d_v[..., :-1], BiasGradients())


def with_ones(v: torch.Tensor) -> torch.Tensor:
    """Values with a column of ones, so that numerators and denominators are one product: (B, K, N, E), E = D+1."""
    return torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)


def split(sums: torch.Tensor) -> Sums:
    """Numerators and denominators of one product with `with_ones`."""
    return Sums(sums[..., :-1], sums[..., -1])


def product(phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Φq(ΦkᵀV), (B, K, N, E)."""
    if causal:
        return _prefix(phi_q, phi_k, v)
    return phi_q @ (phi_k.transpose(-1, -2) @ v)


def product_backward(
    phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of phi_q, phi_k and v, given grad (B, K, N, E)."""
    if causal:
        d_q = _prefix(grad, v, phi_k)  # Σ_{j≤i} (g_i·v_j) φk_j
        d_k = _suffix(v, grad, phi_q)  # Σ_{i≥j} (v_j·g_i) φq_i
        return d_q, d_k, _suffix(phi_k, phi_q, grad)
    state, d_state = phi_k.transpose(-1, -2) @ v, phi_q.transpose(-1, -2) @ grad  # B, K, M, E
    return grad @ state.transpose(-1, -2), v @ d_state.transpose(-1, -2), phi_k @ d_state


def _prefix(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """out_i = Σ_{j≤i} (a_i·b_j) c_j: dense inside chunks of L tokens, running sums of bᵀc between them."""
    n = a.shape[-2]
    if n <= _CHUNK:
        return (a @ b.transpose(-1, -2)).tril() @ c
    a, b, c = (_chunks(x) for x in (a, b, c))  # B, K, N/L, L, ·
    states = b.transpose(-1, -2) @ c
    # shifted, not subtracted: what a chunk adds must not pass through its own state, or rounding would look ahead
    before = torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1].cumsum(2)], dim=2)
    out = (a @ b.transpose(-1, -2)).tril() @ c + a @ before
    return out.flatten(2, 3)[:, :, :n]


def _suffix(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return _prefix(a.flip(2), b.flip(2), c.flip(2)).flip(2)


def _chunks(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[2] % _CHUNK)).unflatten(2, (-1, _CHUNK))


def _why_not(case: Case) -> str | None:
    return 'there is a bias' if case.has_bias else None


def _cost(case: Case) -> float | None:
    return (case.n + (case.keys or case.n)) * case.m * (case.d + 1.0)


def log_scale(inputs: Inputs, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Nothing is left out."""
    return inputs.v.new_zeros(())


BACKEND = Backend('linear', _why_not, _cost, Product(forward, backward, own_dtype, log_scale=log_scale))
