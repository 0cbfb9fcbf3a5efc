"""Attention through FlexAttention: softmax of log(φq·φk) + bias is kernelized attention. Not run on a GPU yet.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
"""

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as _flex_attention

from ..bias import whole_table
from .interface import Backend, Case, Grid, Inputs, Whole, by_name_only, not_between_cells


def attend(inputs: Inputs, case: Case) -> torch.Tensor:
    """(B, K, N, D) in v's dtype."""
    phi_q, phi_k, v, bias = inputs
    table = None if bias is None else whole_table(bias, case.grid)
    return flex_attention(phi_q, phi_k, v.to(phi_q.dtype), table, case.grid, case.causal).to(v.dtype)


def flex_attention(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    grid: Grid,
    causal: bool,
    compiled: bool = True,
) -> torch.Tensor:
    """(B, K, N, D) attention output; bias (K, 2H-1, 2W-1) or None, grid (H, W). Fused when compiled."""
    height, width = grid
    if bias is not None:
        # as everywhere else: a constant added to all offsets must not cost the logarithms their digits
        visible = bias.detach()[..., :width] if causal else bias.detach()
        bias = bias - visible.amax((1, 2), keepdim=True).clamp(min=torch.finfo(bias.dtype).min)
    # Products of small features would vanish: a factor per query cancels, one per key returns as its logarithm.
    # Token by token, so that no later key changes the rounding of earlier ones.
    phi_q, phi_k, key_size = phi_q / _largest(phi_q), phi_k / _largest(phi_k), _largest(phi_k).log().squeeze(-1)

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        masked = score == 0  # not score <= 0: a NaN stays one
        # the inner where keeps the gradient of log away from zero keys
        score = torch.where(masked, -torch.inf, torch.log(torch.where(masked, 1.0, score))) + key_size[b, h, k]
        if bias is None:
            return score
        dy = k // width - q // width + height - 1
        dx = k % width - q % width + width - 1
        return score + bias[h, dy, dx]

    mask = create_block_mask(_causal, None, None, *2 * phi_q.shape[2:3], device=v.device) if causal else None
    run = torch.compile(_flex_attention) if compiled else _flex_attention
    return run(phi_q, phi_k, v, score_mod=score_mod, block_mask=mask, scale=1.0)


def _largest(phi: torch.Tensor) -> torch.Tensor:
    """The largest feature of each token (B, K, N, 1), a constant to autograd; zero keys stay zero."""
    return phi.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(phi.dtype).tiny)


def _causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k <= q


def _why_not(case: Case) -> str | None:
    if case.device != 'cuda':
        return f'FlexAttention runs on CUDA, tensors are on {case.device}'
    return not_between_cells(case) if case.positive else 'softmax of logarithms needs positive features'


BACKEND = Backend('flex', _why_not, by_name_only, Whole(attend))
