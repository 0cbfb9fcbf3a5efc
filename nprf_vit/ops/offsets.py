"""Offset tables read as the (block-)Toeplitz matrices they stand for, and back.

# K heads, H×W grid; a tile has q_rows×q_cols queries and k_rows×k_cols keys
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

# Beyond e^20 between the extremes of c, rows that see only small offsets get their own maximum (an exp per pair).
WIDE = 20.0


def toeplitz_view(
    table: torch.Tensor, queries: tuple[int, int], keys: tuple[int, int], top: int = 0, left: int = 0
) -> torch.Tensor:
    """(K, rows, cols) -> (K, q_rows, q_cols, k_rows, k_cols) without copying, queries in reversed order.

    Reversed, because then every stride is positive: entry (y', x', y, x) is table[top + y + y', left + x + x'].
    """
    head, row, col = table.stride()
    start = table.storage_offset() + top * row + left * col
    return table.as_strided((table.shape[0], *queries, *keys), (head, row, col, row, col), start)


def sum_offsets(x: torch.Tensor, memory: torch.Tensor, reversed_queries: bool) -> torch.Tensor:
    """Adjoint of `toeplitz_view`: sums (K, q_rows, q_cols, k_rows, k_cols) over equal offsets, in a fixed order.

    Written into zeros along sheared strides, equal offsets line up in columns; the sum is then an ordinary one.

    Args:
        x: (K, q_rows, q_cols, k_rows, k_cols).
        memory: Zeros of shape `offsets_shape(x.shape)`, which may be used again for the same shape and order.
        reversed_queries: Whether x has its queries in reversed order.

    Returns:
        (K, q_rows+k_rows-1, q_cols+k_cols-1).
    """
    heads, q_rows, q_cols, k_rows, k_cols = x.shape
    rows, cols = memory.shape[-2:]
    sign = 1 if reversed_queries else -1
    start = 0 if reversed_queries else (q_rows - 1) * cols + q_cols - 1
    strides = (
        q_rows * q_cols * rows * cols,
        q_cols * rows * cols + sign * cols,
        rows * cols + sign,
        cols,
        1,
    )
    memory.as_strided(x.shape, strides, memory.storage_offset() + start).copy_(x)
    return memory.sum((1, 2))


def offsets_shape(shape: torch.Size) -> tuple[int, ...]:
    """Shape of the memory that `sum_offsets` needs."""
    heads, q_rows, q_cols, k_rows, k_cols = shape
    return (heads, q_rows, q_cols, q_rows + k_rows - 1, q_cols + k_cols - 1)


def expand_table(table: torch.Tensor, grid_size: Sequence[int]) -> torch.Tensor:
    """Gather the dense bias B[k, i, j] = table[k, offset of key j from query i]; O(N²) memory.

    Args:
        table: (K, 2H-1, 2W-1) or (K, 2N-1).
        grid_size: (H, W) or (N,).

    Returns:
        (K, N, N).
    """
    offsets = []
    for s in grid_size:
        pos = torch.arange(s, device=table.device)
        offsets.append(pos[None, :] - pos[:, None] + (s - 1))  # s queries, s keys
    if len(offsets) == 1:
        return table[:, offsets[0]]  # K, N, N
    y, x = offsets
    index = y[:, None, :, None] * (2 * grid_size[1] - 1) + x[None, :, None, :]  # H, W, H, W
    n = grid_size[0] * grid_size[1]
    return table.flatten(1)[:, index.reshape(n, n)]  # K, N, N


def extend_table(window: torch.Tensor, far: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Pads a window (K, 2R+1, 2S+1) with `far` (K,), or crops it, to the offsets of a grid: (K, 2H-1, 2W-1)."""
    y, x = _margins(window, height, width)
    inside = F.pad(torch.ones_like(window[0], dtype=torch.bool), (x, x, y, y))
    return torch.where(inside, F.pad(window, (x, x, y, y)), far[:, None, None])


def extend_table_backward(
    grad: torch.Tensor, window: torch.Tensor, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of window and far, given that of the extended table."""
    y, x = _margins(window, height, width)
    d_window = F.pad(grad, (-x, -x, -y, -y))
    outside = grad.clone()
    inner = outside[:, max(y, 0) : grad.shape[1] - max(y, 0), max(x, 0) : grad.shape[2] - max(x, 0)]
    inner.zero_()  # not a difference of sums, which would round where far hardly occurs
    return d_window, outside.sum((1, 2))


def row_maxima(table: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """The largest visible bias per query, (K, H, W) in reversed order: windows of pooling follow the table's order."""
    largest = F.max_pool1d(table.transpose(1, 2), grid[0], 1).transpose(1, 2)  # K, H, 2W-1
    largest = F.max_pool1d(largest, grid[1], 1)  # K, H, W
    return largest.clamp(min=torch.finfo(table.dtype).min)  # a row of -inf alone: its differences stay -inf


def is_wide(bias: torch.Tensor) -> bool:
    """Whether rows need a maximum of their own, given the biases (K, ·, ·) that any row can see: if so in one head."""
    spread = bias.amax((1, 2)).double() - bias.amin((1, 2)).double()  # the same answer for bias.double()
    return not (spread <= WIDE).all()  # NaN, from a head of -inf alone, is wide as well


def peaked_heads(
    table: torch.Tensor, far: torch.Tensor | None, causal: bool, outweighs: float = 1024.0
) -> torch.Tensor | None:
    """(K,) whether in a head one offset has more than `outweighs` times the weight of all others; None if in no head.

    Then attention is nearly one-hot, z_i ≈ v_j, and gradients are what is left of g·v_j - g·z_i: in float32 wrong by
    about 1e-6 of that ratio. The far constant counts once for every entry of the table.
    """
    visible = table.flatten(1)[:, : table[0].numel() // 2 + 1] if causal else table.flatten(1)  # K, offsets
    top = visible.amax(1, keepdim=True)
    near = visible > top - math.log(outweighs)
    alone = near.sum(1) == 1
    if not alone.any():
        return None
    others = visible.double().masked_fill(near, -torch.inf).logsumexp(1)  # K
    if far is not None:
        others = torch.logaddexp(others, far.double() + math.log(visible.shape[1]))
    peaked = alone & (top[:, 0].double() - others > math.log(outweighs)) & (others > -torch.inf)
    return peaked if peaked.any() else None


def _margins(window: torch.Tensor, height: int, width: int) -> tuple[int, int]:
    return height - 1 - window.shape[1] // 2, width - 1 - window.shape[2] // 2
