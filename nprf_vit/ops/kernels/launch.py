"""From tensors to launches: grids, strides, tile sizes. What `backends/fused.py` calls.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton

from .attention_backward import feature_gradient, gradient_state, value_gradient
from .attention_forward import attention_forward
from .bias_gradient import bias_gradient, bias_gradient_parts
from .features import feature_map, feature_map_gradient
from .prepare import prepare

_recorder: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar('recorder', default=None)
_TOKENS_PER_PART = 4096  # of the linear term's sums, whose parts every tile of queries adds up again
_PARTS = 8


class Launch(NamedTuple):
    """A kernel with its arguments by name, constants included."""

    kernel: triton.JITFunction
    programs: int
    arguments: dict[str, Any]
    num_warps: int


def launch(kernel: triton.JITFunction, programs: int, *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Start a kernel, or only note it where launches are recorded."""
    recorder = _recorder.get()
    if recorder is None:
        kernel[(programs,)](*args, num_warps=num_warps, **constants)
    else:
        recorder.append(Launch(kernel, programs, dict(zip(kernel.arg_names, args)) | constants, num_warps))


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within it nothing runs: launches go into the list, so that tensors may be on the meta device."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


class Problem(NamedTuple):
    """What a call is about, apart from its tensors."""

    grid: tuple[int, int]
    bias: str  # 'none', 'full' or 'window'
    radius: tuple[int, int]  # of the table
    causal: bool
    positive: bool
    precision: str  # of products of float32: 'tf32', 'tf32x3' or 'ieee'


class Tables(NamedTuple):
    """What `prepare` makes of a bias, and the sums of the linear term."""

    c: torch.Tensor  # K, T
    log_c: torch.Tensor  # K, T
    heads: torch.Tensor  # K, 4
    state: torch.Tensor  # B·K, parts, M, D+1
    parts: int


class Forward(NamedTuple):
    z: torch.Tensor  # B, K, N, D
    den: torch.Tensor  # B, K, N
    shift: torch.Tensor  # B, K, N
    tables: Tables


def block(size: int) -> int:
    """The power of two that holds `size`, at least 16, the least a tensor core takes."""
    return max(16, triton.next_power_of_2(size))


def is_long(*tensors: torch.Tensor) -> bool:
    """Whether a token's offset within a head may pass 2³¹ elements."""
    return any(x.shape[2] * x.stride(2) >= 2**31 for x in tensors)


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def has_linear_term(p: Problem) -> bool:
    return p.bias != 'full' and not p.causal


def run_prepare(phi_k, v, bias, far, p: Problem) -> Tables:
    (b, k, n, m), d = phi_k.shape, v.shape[-1]
    tables = 0 if bias is None else k
    entries = 1 if bias is None else bias[0].numel()
    c, log_c = (v.new_empty(k, entries, dtype=torch.float32) for _ in range(2))
    heads = v.new_empty(k, 4, dtype=torch.float32)
    parts = min(_PARTS, triton.cdiv(n, _TOKENS_PER_PART)) if has_linear_term(p) else 0
    block_m = min(block(m), 64)
    chunks = triton.cdiv(m, block_m)
    state = v.new_empty(b * k, parts, m, d + 1, dtype=torch.float32)
    programs = tables + parts * chunks * b * k
    if programs:
        launch(
            prepare,
            programs,
            c if bias is None else bias,
            c if far is None else far,
            c,
            log_c,
            heads,
            entries,
            (entries + 1) // 2 if p.causal else entries,
            phi_k,
            v,
            state,
            *strides(phi_k),
            *strides(v),
            k,
            n,
            m,
            d,
            tables,
            max(1, parts),
            chunks,
            WINDOW=far is not None,
            BLOCK=1024,
            BLOCK_N=32,
            BLOCK_M=block_m,
            BLOCK_D=block(d),
            PRECISION=p.precision,
            LONG=is_long(phi_k, v),
            num_warps=4,
        )
    return Tables(c, log_c, heads, state, parts)


def query_tile(p: Problem) -> tuple[int, int, int, int]:
    """Rows and columns of a tile of queries and of one of keys."""
    if p.bias != 'window' or p.causal:
        return 1, 64, 1, 32
    return (1, 64, 1, 32) if p.grid[0] == 1 else (8, 8, 2, 16)


def tile_count(p: Problem, rows: int, cols: int) -> int:
    height, width = p.grid
    if p.bias != 'window' or p.causal:
        return triton.cdiv(height * width, rows * cols)
    return triton.cdiv(height, rows) * triton.cdiv(width, cols)


def run_forward(phi_q, phi_k, v, bias, far, p: Problem, z: torch.Tensor) -> Forward:
    """Attention into z; two launches, one where there is neither a bias nor a linear term."""
    (b, k, n, m), d = phi_q.shape, v.shape[-1]
    tables = run_prepare(phi_k, v, bias, far, p)
    den, shift = (v.new_empty(b, k, n, dtype=torch.float32) for _ in range(2))
    q_rows, q_cols, k_rows, k_cols = query_tile(p)
    tiles = tile_count(p, q_rows, q_cols)
    block_m = min(block(m), 64)
    launch(
        attention_forward,
        tiles * b * k,
        phi_q,
        phi_k,
        v,
        tables.c,
        tables.log_c,
        tables.heads,
        tables.state,
        z,
        den,
        shift,
        *strides(phi_q),
        *strides(phi_k),
        *strides(v),
        *strides(z),
        k,
        n,
        m,
        d,
        *p.grid,
        *p.radius,
        tables.c.shape[1],
        tiles,
        tables.parts,
        BIAS=p.bias,
        CAUSAL=p.causal,
        POSITIVE=p.positive,
        Q_ROWS=q_rows,
        Q_COLS=q_cols,
        K_ROWS=k_rows,
        K_COLS=k_cols,
        BLOCK_M=block_m,
        CHUNKS=triton.cdiv(m, block_m),
        BLOCK_D=block(d),
        PRECISION=p.precision,
        LONG=is_long(phi_q, phi_k, v, z),
        num_warps=4,
    )
    return Forward(z, den, shift, tables)


def run_backward(phi_q, phi_k, v, bias, far, p: Problem, forward: Forward, g, d_v: torch.Tensor, bias_grad: bool):
    """Gradients of phi_q, phi_k, bias and far, and that of v into d_v; six launches, four without a bias gradient."""
    (b, k, n, m), d = phi_q.shape, v.shape[-1]
    tables, linear = forward.tables, has_linear_term(p)
    delta, ratio = (torch.empty_like(forward.den) for _ in range(2))
    d_state = torch.empty_like(tables.state)
    block_m = min(block(m), 64)
    chunks = triton.cdiv(m, block_m)
    parts = max(1, tables.parts) if linear else triton.cdiv(n, 64)
    long = is_long(phi_q, phi_k, v, g, d_v)
    blocks = {'BLOCK_M': block_m, 'BLOCK_D': block(d), 'PRECISION': p.precision, 'LONG': long, 'num_warps': 4}
    launch(
        gradient_state,
        parts * (chunks if linear else 1) * b * k,
        phi_q,
        g,
        forward.z,
        forward.den,
        forward.shift,
        tables.heads,
        delta,
        ratio,
        d_state,
        *strides(phi_q),
        *strides(g),
        *strides(forward.z),
        k,
        n,
        m,
        d,
        parts,
        chunks if linear else 1,
        BIAS=p.bias,
        LINEAR=linear,
        BLOCK_N=32,
        **blocks,
    )
    rows, cols, other_rows, other_cols = query_tile(p)
    tiles = tile_count(p, rows, cols)
    shape = {'R_ROWS': rows, 'R_COLS': cols, 'C_ROWS': other_rows, 'C_COLS': other_cols}
    geometry = (k, n, m, d, *p.grid, *p.radius, tables.c.shape[1], tiles, tables.parts)
    stats = forward.shift, delta, ratio
    grads = []
    for of_queries, own, other, phi, state in ((True, g, v, phi_k, tables.state), (False, v, g, phi_q, d_state)):
        out = torch.empty(b, k, n, m, dtype=torch.float32, device=v.device)
        launch(
            feature_gradient,
            tiles * chunks * b * k,
            own,
            other,
            phi,
            tables.log_c,
            tables.heads,
            *stats,
            state,
            out,
            *strides(own),
            *strides(other),
            *strides(phi),
            *strides(out),
            *geometry,
            chunks,
            BIAS=p.bias,
            CAUSAL=p.causal,
            OF_QUERIES=of_queries,
            **shape,
            **blocks,
        )
        grads.append(out)
    launch(
        value_gradient,
        tiles * b * k,
        phi_q,
        phi_k,
        g,
        tables.log_c,
        tables.heads,
        forward.shift,
        ratio,
        d_state,
        d_v,
        *strides(phi_q),
        *strides(phi_k),
        *strides(g),
        *strides(d_v),
        *geometry,
        BIAS=p.bias,
        CAUSAL=p.causal,
        CHUNKS=chunks,
        **shape,
        **blocks,
    )
    d_bias = d_far = None
    if bias_grad and bias is not None:
        d_bias, d_far = _run_bias_gradient(phi_q, phi_k, v, g, bias, far, p, tables, stats, blocks)
    return *grads, d_bias, d_far


def _run_bias_gradient(phi_q, phi_k, v, g, bias, far, p: Problem, tables: Tables, stats, blocks):
    (b, k, n, m), d = phi_q.shape, v.shape[-1]
    width = p.grid[1]
    block_x = 16 if width <= 16 else 32
    reach = min(triton.cdiv(p.radius[1] + block_x - 1, block_x), triton.cdiv(width, block_x))
    diagonals, dys = 2 * reach + 1, 2 * p.radius[0] + 1
    programs = k * dys * diagonals
    splits = max(1, min(b, 1024 // programs))
    scratch = torch.empty(programs * splits, 2 * block_x, dtype=torch.float32, device=v.device)
    launch(
        bias_gradient_parts,
        programs * splits,
        phi_q,
        phi_k,
        v,
        g,
        tables.log_c,
        tables.heads,
        *stats,
        scratch,
        *strides(phi_q),
        *strides(phi_k),
        *strides(v),
        *strides(g),
        b,
        k,
        n,
        m,
        d,
        *p.grid,
        *p.radius,
        tables.c.shape[1],
        diagonals,
        splits,
        BIAS=p.bias,
        CAUSAL=p.causal,
        BLOCK_X=block_x,
        DIAGONALS=8,
        CHUNKS=triton.cdiv(m, blocks['BLOCK_M']),
        **blocks,
    )
    d_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    d_far = None if far is None else torch.empty_like(far)
    count = triton.cdiv(bias[0].numel(), 256)
    launch(
        bias_gradient,
        k * count,
        scratch,
        d_bias,
        d_bias if far is None else d_far,
        k,
        *p.radius,
        diagonals,
        splits,
        count,
        WINDOW=far is not None,
        BLOCK_X=block_x,
        BLOCK=256,
        num_warps=4,
    )
    return d_bias, d_far


def run_features(q, k, w, precision: str):
    """phi_q, phi_k (B, K, N, M) of normalized queries and keys; one launch."""
    (b, heads, n, d), m = q.shape, w.shape[1]
    phi_q, phi_k = (torch.empty(b, heads, n, m, dtype=torch.float32, device=q.device) for _ in range(2))
    block_m = min(block(m), 64)
    tiles = triton.cdiv(n, 64)
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
        BLOCK_N=64,
        BLOCK_M=block_m,
        CHUNKS=triton.cdiv(m, block_m),
        BLOCK_D=block(d),
        PRECISION=precision,
        LONG=is_long(q, k),
        num_warps=4,
    )
    return phi_q, phi_k


def run_features_backward(q, k, w, phi_q, phi_k, d_phi_q, d_phi_k, d_q, d_k, precision: str) -> None:
    """Gradients of queries and keys into d_q and d_k; one launch."""
    (b, heads, n, d), m = q.shape, w.shape[1]
    block_m = min(block(m), 64)
    tiles = triton.cdiv(n, 64)
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
        BLOCK_N=64,
        BLOCK_M=block_m,
        CHUNKS=triton.cdiv(m, block_m),
        BLOCK_D=block(d),
        PRECISION=precision,
        LONG=is_long(q, k, d_q, d_k),
        num_warps=4,
    )
