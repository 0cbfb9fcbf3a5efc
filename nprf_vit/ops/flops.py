"""What `torch.utils.flop_counter.FlopCounterMode` counts for the attention ops: a multiply-add is two.

Counts are those of the algorithm that runs, as in docs/backends.md: the backend named, or what 'auto' takes on a CPU.
They follow from shapes; a bias so wide that an algorithm hands it on costs what `direct` does.

# B batch, K heads, N queries, L keys, M features, D head dim, H×W grid (N = H·W)
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from . import custom_op, partial, toeplitz  # noqa: F401  the ops must exist before their formulas, the fused ones too
from .backends import fft, window
from .backends.fft_forms import CAUSAL_BLOCK
from .backends.interface import Case
from .dispatch import choose

Shape = tuple[int, ...]


class Count(NamedTuple):
    """Multiply-adds of one head and batch item."""

    forward: int
    backward: int


def attend_flops(
    phi_q: Shape,
    phi_k: Shape,
    v: Shape,
    bias: Shape | None,
    far: Shape | None,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    backend: str,
    cell_rows: int = 0,
    cell_cols: int = 0,
    **kwargs: Any,
) -> int:
    """Forward; tensors are given as shapes."""
    case = _case(phi_q, v, bias, far, (height, width), causal, (cell_rows, cell_cols))
    return 2 * phi_q[0] * phi_q[1] * count(case, backend).forward


def attend_partial_flops(
    phi_q: Shape,
    phi_k: Shape,
    v: Shape,
    bias: Shape | None,
    far: Shape | None,
    height: int,
    width: int,
    positive: bool,
    backend: str,
    cell_rows: int = 0,
    cell_cols: int = 0,
    **kwargs: Any,
) -> int:
    """As `attend_flops`, never causal."""
    options = height, width, False, positive, backend, cell_rows, cell_cols
    return attend_flops(phi_q, phi_k, v, bias, far, *options)


def attend_backward_flops(
    phi_q: Shape,
    phi_k: Shape,
    v: Shape,
    bias: Shape | None,
    far: Shape | None,
    z: Shape,
    den: Shape,
    grad: Shape,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    backend: str,
    bias_grad: bool,
    cell_rows: int = 0,
    cell_cols: int = 0,
    log_den_grad: Shape | None = None,
    **kwargs: Any,
) -> int:
    """Backward: scores are computed again."""
    case = _case(phi_q, v, bias, far, (height, width), causal, (cell_rows, cell_cols))
    return 2 * phi_q[0] * phi_q[1] * count(case, backend).backward


def fused_flops(
    phi_q: Shape, phi_k: Shape, v: Shape, bias: Shape | None, far: Shape | None, *args: Any, **kwargs: Any
) -> int:
    """Forward of the kernels: all pairs, or linear without a bias."""
    causal = next(x for x in args if isinstance(x, bool))
    return 2 * phi_q[0] * phi_q[1] * _fused(phi_q[2], phi_q[3], v[3], bias is not None, causal).forward


def fused_backward_flops(
    phi_q: Shape, phi_k: Shape, v: Shape, bias: Shape | None, far: Shape | None, *args: Any, **kwargs: Any
) -> int:
    """Backward of the kernels."""
    causal = next(x for x in args if isinstance(x, bool))
    return 2 * phi_q[0] * phi_q[1] * _fused(phi_q[2], phi_q[3], v[3], bias is not None, causal).backward


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
    return 2 * batch * heads * (_fused(n, w[1], d, bias is not None, causal).forward + 2 * n * w[1] * d)


def fused_qkv_backward_flops(
    qkv: Shape, w: Shape, bias: Shape | None, far: Shape | None, *args: Any, **kwargs: Any
) -> int:
    """Backward likewise: eᵀw of queries and keys, 2NMD per head."""
    batch, n, _, heads, d = qkv
    causal = next(x for x in args if isinstance(x, bool))
    return 2 * batch * heads * (_fused(n, w[1], d, bias is not None, causal).backward + 2 * n * w[1] * d)


def count(case: Case, backend: str = 'auto') -> Count:
    """Multiply-adds of a call by a backend, or by the one that 'auto' takes; by no other than ours."""
    name = choose(case).name if backend == 'auto' else backend
    if name == 'linear' or not case.has_bias:
        return _linear(case)
    return {'fft': _fft, 'window': _window, 'cells': _cells}.get(name, _direct)(case)


def _direct(case: Case) -> Count:
    pairs = case.n**2 // (2 if case.causal else 1)
    return Count(pairs * (case.m + case.d + 1), pairs * (3 * case.m + 2 * case.d + 1))


def _linear(case: Case) -> Count:
    keys, size = case.keys or case.n, case.m * (case.d + 1)
    return Count((case.n + keys) * size, (2 * case.n + 3 * keys) * size)


def _window(case: Case) -> Count:
    keys, size = window.keys_seen(case), case.m * (case.d + 1)
    near = Count(keys * (case.m + case.d + 1), keys * (3 * case.m + 2 * case.d + 1))
    return Count(case.n * (near.forward + 2 * size), case.n * (near.backward + 5 * size))


def _cells(case: Case) -> Count:
    assert case.cells is not None  # the backend serves nothing else
    size, pairs = case.m * (case.d + 1), math.prod(case.cells) ** 2
    return Count((2 * case.n + pairs) * size, (5 * case.n + 3 * pairs) * size)


def _fft(case: Case) -> Count:
    """Two real transforms per channel, 2.5·L·log₂ L operations each, and a complex product; four in backward."""
    channels = case.m * (case.d + 1)
    if case.causal:  # one of half the length per level, and dense blocks
        points = fft.causal_points(case.n)
        dense = case.n * CAUSAL_BLOCK * (case.m + case.d + 1) // 2
    else:
        padded = math.prod(toeplitz.padded_size(*case.grid))
        points, dense = padded * math.log2(max(2, padded)) + 0.6 * padded, 0
    forward = round(2.5 * channels * points) + dense
    return Count(forward, 2 * forward)


def _fused(n: int, m: int, d: int, has_bias: bool, causal: bool) -> Count:
    case = Case((1, n), m, d, causal, has_bias)
    return _direct(case) if has_bias else _linear(case)


def _case(
    phi_q: Shape,
    v: Shape,
    bias: Shape | None,
    far: Shape | None,
    grid: tuple[int, int],
    causal: bool,
    cells: tuple[int, int],
) -> Case:
    radius = None if bias is None or far is None else (bias[1] // 2, bias[2] // 2)
    keys = None if v[2] == phi_q[2] else v[2]
    between = cells if cells[0] else None
    return Case(grid, phi_q[3], v[3], causal, bias is not None, radius, cells=between, keys=keys)


def fvcore_handles() -> dict[str, Callable[[list[Any], list[Any]], int]]:
    """For `fvcore.nn.FlopCountAnalysis(model, x).set_op_handle(**fvcore_handles())`: there a multiply-add is one."""
    formulas: dict[str, Callable[..., int]] = {'attend': attend_flops, 'attend_partial': attend_partial_flops}

    def handle(formula: Callable[..., int]) -> Callable[[list[Any], list[Any]], int]:
        return lambda inputs, outputs: formula(*(_traced(x) for x in inputs)) // 2

    return {f'nprf_vit::{name}': handle(formula) for name, formula in formulas.items()}


def _traced(value: Any) -> Any:
    """A value of a traced graph: the shape of a tensor, or the constant itself."""
    return tuple(value.type().sizes()) if isinstance(value.type(), torch.TensorType) else value.toIValue()


_ops = torch.ops.nprf_vit
register_flop_formula(_ops.attend)(attend_flops)
register_flop_formula(_ops.fused)(fused_flops)
register_flop_formula(_ops.attend_partial)(attend_partial_flops)
register_flop_formula(_ops.attend_backward)(attend_backward_flops)
register_flop_formula(_ops.fused_backward)(fused_backward_flops)
register_flop_formula(_ops.fused_qkv)(fused_qkv_flops)
register_flop_formula(_ops.fused_qkv_backward)(fused_qkv_backward_flops)
