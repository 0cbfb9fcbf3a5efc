"""What the fused ops do where their kernels are not trusted: the same in plain PyTorch.

# B batch, K heads, N tokens, M features, D head dim
"""

from typing import NamedTuple

import torch

from ..features import SHORTEST, feature_map
from . import batched


class Plain(NamedTuple):
    z: torch.Tensor  # B, K, N, D
    den: torch.Tensor  # B, K, N
    log_scale: torch.Tensor  # expands to B, K, N


def attend_plain(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
) -> Plain:
    """(B, K, N, D) float32, with the denominators of `batched.attend`."""
    inputs, grid = (phi_q, phi_k, v.float(), bias, far), (height, width)
    z, den = batched.attend(*inputs, grid, causal, positive)
    # what is left out of causal sums nobody asks for
    return Plain(z, den, den.new_zeros(()) if causal else batched.log_scale(*inputs[1:], grid))


def attend_plain_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    grad: torch.Tensor,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    bias_grad: bool,
    log_den_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of phi_q, phi_k, v, bias and far, as `attend_backward`'s; the forward is computed again."""
    inputs, grid = (phi_q, phi_k, v.float(), bias, far), (height, width)
    z, den = batched.attend(*inputs, grid, causal, positive)
    grads = batched.attend_backward(*inputs, z, den, grad.float(), grid, causal, bias_grad, None, log_den_grad)
    d_q, d_k, d_v, d_bias, d_far = (v.new_empty(0, dtype=torch.float32) if x is None else x.contiguous() for x in grads)
    return d_q, d_k, d_v.to(v.dtype), d_bias, d_far


def features_plain(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """phi_q and phi_k (B, K, N, M) of normalized queries and keys; a causal model sees the same ones."""
    phi_q, phi_k = (feature_map(x, w, role=role, normalize=True).contiguous() for x, role in ((q, 'query'), (k, 'key')))
    return phi_q, phi_k


def features_plain_backward(x: torch.Tensor, w: torch.Tensor, phi: torch.Tensor, d_phi: torch.Tensor) -> torch.Tensor:
    """dx from dφ: with e = φ∘dφ, dx̂ = eᵀw, and dx is dx̂ without its part along x̂, over ‖x‖.

    ‖x̂‖²/2 is constant but for vectors too short to be stretched; what its gradient adds lies along x̂.
    """
    x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    unit = x / norm.clamp(min=SHORTEST)
    e = phi * d_phi
    d_unit = e @ w.float()
    along = (d_unit * unit).sum(-1, keepdim=True)
    return (d_unit - torch.where(norm >= SHORTEST, along, 0.0) * unit) / norm.clamp(min=SHORTEST)
