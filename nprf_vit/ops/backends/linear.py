"""Products without bias, Φq(ΦkᵀV): O(N·M·E) time. docs/math.md, "Linear".

# B batch, K heads, N tokens, M features, E value columns, L tokens per chunk
"""

import torch

_CHUNK = 128  # causal: prefix states take N/L·M·E numbers, no more than the values themselves once L ≥ M


def forward(phi_q, phi_k, v, bias, grid, causal):
    """Σ_j (φq_i·φk_j) [v_j, 1], over j ≤ i when causal; `bias` must be None. See `direct.forward`."""
    return split(product(phi_q, phi_k, with_ones(v), causal))


def backward(phi_q, phi_k, v, bias, grid, causal, grad, bias_grad):
    """Gradients as in `direct.backward`: each is again a linear product, of other arguments."""
    *grads, d_v = product_backward(phi_q, phi_k, with_ones(v), grad, causal)
    return *grads, d_v[..., :-1], None


def with_ones(v):
    """Values with a column of ones, so that numerators and denominators are one product: (B, K, N, E), E = D+1."""
    return torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)


def split(sums):
    return sums[..., :-1], sums[..., -1]


def product(phi_q, phi_k, v, causal):
    """Φq(ΦkᵀV), (B, K, N, E)."""
    if causal:
        return _prefix(phi_q, phi_k, v)
    return phi_q @ (phi_k.transpose(-1, -2) @ v)


def product_backward(phi_q, phi_k, v, grad, causal):
    """Gradients of phi_q, phi_k and v, given grad (B, K, N, E)."""
    if causal:
        d_q = _prefix(grad, v, phi_k)  # Σ_{j≤i} (g_i·v_j) φk_j
        d_k = _suffix(v, grad, phi_q)  # Σ_{i≥j} (v_j·g_i) φq_i
        return d_q, d_k, _suffix(phi_k, phi_q, grad)
    state, d_state = phi_k.transpose(-1, -2) @ v, phi_q.transpose(-1, -2) @ grad  # B, K, M, E
    return grad @ state.transpose(-1, -2), v @ d_state.transpose(-1, -2), phi_k @ d_state


def _prefix(a, b, c):
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


def _suffix(a, b, c):
    return _prefix(a.flip(2), b.flip(2), c.flip(2)).flip(2)


def _chunks(x):
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % _CHUNK))
    return x.unflatten(2, (-1, _CHUNK))
