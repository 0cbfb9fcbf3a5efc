"""What `torch.utils.flop_counter.FlopCounterMode` counts for the attention ops: a multiply-add is two.

# B batch, K heads, N tokens, M features, D head dim
"""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import custom_op, partial  # noqa: F401  the ops must exist before their formulas, the fused ones too

Shape = tuple[int, ...]


def attend_flops(
    phi_q: Shape,
    phi_k: Shape,
    v: Shape,
    bias: Shape | None,
    far: Shape | None,
    height: int,
    width: int,
    causal: bool,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Forward: N²(M+D+1) multiply-adds per head, half of them if causal, or 2NM(D+1) without a bias.

    With a bias between g cells (2N+g²)M(D+1), if that is less. A count of the attention, not of the algorithm: `fft`
    and `window` do less or more. Arguments are shapes.
    """
    batch, heads, n, m = phi_q
    if bias is None:
        return 2 * batch * heads * (n + v[2]) * m * (v[3] + 1)
    return 2 * batch * heads * _forward(n, m, v[-1], True, causal, _cells(args[2:4]))


def attend_partial_flops(
    phi_q: Shape, phi_k: Shape, v: Shape, bias: Shape | None, far: Shape | None, *args: Any, **kwargs: Any
) -> int:
    """As `attend_flops`, never causal."""
    batch, heads, n, m = phi_q
    return 2 * batch * heads * _forward(n, m, v[-1], bias is not None, False, _cells(args[4:6]))


def attend_backward_flops(
    phi_q: Shape, phi_k: Shape, v: Shape, bias: Shape | None, far: Shape | None, *args: Any, **kwargs: Any
) -> int:
    """Backward: N²(3M+2D+1), half if causal, scores computed again; 5NM(D+1) without a bias; (5N+3g²)M(D+1)."""
    batch, heads, n, m = phi_q
    if bias is None:
        return 2 * batch * heads * (2 * n + 3 * v[2]) * m * (v[3] + 1)
    causal = next(x for x in args if isinstance(x, bool))
    return 2 * batch * heads * _backward(n, m, v[-1], True, causal, _cells(args[9:11]))


def fused_qkv_flops(
    qkv: Shape,
    w: Shape,
    bias: Shape | None,
    far: Shape | None,
    height: int,
    width: int,
    causal: bool,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Forward from a packed projection: also w·x of queries and keys, 2NMD per head."""
    batch, n, _, heads, d = qkv
    return 2 * batch * heads * (_forward(n, w[1], d, bias is not None, causal) + 2 * n * w[1] * d)


def fused_qkv_backward_flops(
    qkv: Shape, w: Shape, bias: Shape | None, far: Shape | None, *args: Any, **kwargs: Any
) -> int:
    """Backward likewise: eᵀw of queries and keys, 2NMD per head."""
    batch, n, _, heads, d = qkv
    causal = next(x for x in args if isinstance(x, bool))
    return 2 * batch * heads * (_backward(n, w[1], d, bias is not None, causal) + 2 * n * w[1] * d)


def _forward(n: int, m: int, d: int, has_bias: bool, causal: bool, cells: int = 0) -> int:
    if not has_bias:
        return 2 * n * m * (d + 1)
    dense = n * n * (m + d + 1) // (2 if causal else 1)
    return min(dense, (2 * n + cells**2) * m * (d + 1)) if cells else dense


def _backward(n: int, m: int, d: int, has_bias: bool, causal: bool, cells: int = 0) -> int:
    if not has_bias:
        return 5 * n * m * (d + 1)
    dense = n * n * (3 * m + 2 * d + 1) // (2 if causal else 1)
    return min(dense, (5 * n + 3 * cells**2) * m * (d + 1)) if cells else dense


def _cells(sizes: tuple[Any, ...]) -> int:
    """Number of cells from the last two arguments of the op, where they are given."""
    return sizes[0] * sizes[1] if len(sizes) == 2 and isinstance(sizes[1], int) else 0


_ops = torch.ops.nprf_vit
register_flop_formula([_ops.attend, _ops.fused])(attend_flops)
register_flop_formula(_ops.attend_partial)(attend_partial_flops)
register_flop_formula([_ops.attend_backward, _ops.fused_backward])(attend_backward_flops)
register_flop_formula(_ops.fused_qkv)(fused_qkv_flops)
register_flop_formula(_ops.fused_qkv_backward)(fused_qkv_backward_flops)
