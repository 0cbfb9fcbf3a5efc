"""From tensors to the launches of the feature map and of its gradient.

# B batch, K heads, N tokens, M features, D head dim
"""

import torch
import triton

from .features import feature_map, feature_map_gradient
from .launch import block, is_long, launch, strides
from .tile_table import tile_for


def run_features(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, precision: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """phi_q, phi_k (B, K, N, M) of normalized queries and keys; one launch."""
    (b, heads, n, d), m = q.shape, w.shape[1]
    phi_q, phi_k = (torch.empty(b, heads, n, m, dtype=torch.float32, device=q.device) for _ in range(2))
    tile = tile_for('feature_map', q, m)
    block_m = min(block(m), tile.features)
    tiles = triton.cdiv(n, tile.own)
    launch(
        feature_map,
        tiles * 2 * b * heads,
        q,
        k,
        w,
        phi_q,
        phi_k,
        *strides(q),
        *strides(k),
        heads,
        n,
        m,
        d,
        tiles,
        BLOCK_N=tile.own,
        BLOCK_M=block_m,
        CHUNKS=triton.cdiv(m, block_m),
        BLOCK_D=block(d),
        PRECISION=precision,
        LONG=is_long(q, k, phi_q),
        num_warps=tile.warps,
    )
    return phi_q, phi_k


def run_features_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    d_phi_q: torch.Tensor,
    d_phi_k: torch.Tensor,
    d_q: torch.Tensor,
    d_k: torch.Tensor,
    precision: str,
) -> None:
    """Gradients of queries and keys into d_q and d_k; one launch."""
    (b, heads, n, d), m = q.shape, w.shape[1]
    tile = tile_for('feature_map_gradient', q, m)
    block_m = min(block(m), tile.features)
    tiles = triton.cdiv(n, tile.own)
    launch(
        feature_map_gradient,
        tiles * 2 * b * heads,
        q,
        k,
        w,
        phi_q,
        phi_k,
        d_phi_q,
        d_phi_k,
        d_q,
        d_k,
        *strides(q),
        *strides(k),
        *strides(d_q),
        *strides(d_k),
        heads,
        n,
        m,
        d,
        tiles,
        BLOCK_N=tile.own,
        BLOCK_M=block_m,
        CHUNKS=triton.cdiv(m, block_m),
        BLOCK_D=block(d),
        PRECISION=precision,
        LONG=is_long(q, k, d_q, d_k, phi_q),
        num_warps=tile.warps,
    )
