"""Kernelized attention written in operators that every exporter knows.

`kernel_attention` is one opaque operator, which ONNX has no name for. This is what the exported graph holds
instead: the `direct` algorithm without its tiles, hence O(N²) memory.

B batch, K heads, N tokens, M features, D head dim.
"""

from collections.abc import Sequence

import torch

from ..cell_grid import expand_cells
from ..offsets import expand_table


def dense_kernel_attention(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    grid_size: Sequence[int] | None = None,
    causal: bool = False,
    cells: Sequence[int] | None = None,
) -> torch.Tensor:
    """Eq. 10 with its N×N weights stored; arguments as in `nprf_vit.ops.kernel_attention`.

    Args:
        phi_q, phi_k: (B, K, N, M).
        v: (B, K, N, D).
        bias: (K, 2H-1, 2W-1) with grid_size (H, W), else (K, 2N-1).
        grid_size: (H, W), or (N,) or None for a sequence.
        causal: Drop the keys after each query.
        cells: (h, w), or (h,) for a sequence: the bias is between these cells.

    Returns:
        (B, K, N, D), in v's dtype.
    """
    with torch.autocast(v.device.type, enabled=False):
        weight = phi_q @ phi_k.transpose(-2, -1)  # B, K, N, N
        if bias is not None:
            size, bias = grid_size or phi_q.shape[2:3], bias.to(weight.dtype)
            bias = expand_table(bias, size) if cells is None else expand_cells(bias, cells, size)  # K, N, N
            if causal:
                bias = bias + torch.full_like(bias[0], float('-inf')).triu(1)
            # a maximum per row cancels in it as well as one per head does, and a sharp bias keeps its small rows
            weight = weight * (bias - bias.amax(-1, keepdim=True)).exp()
        elif causal:
            weight = weight.tril()
        return (weight @ v.to(weight.dtype) / weight.sum(-1, keepdim=True)).to(v.dtype)
