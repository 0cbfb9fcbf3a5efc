"""From tensors to the launches of the backward.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
"""

from __future__ import annotations

import torch
import triton

from .bias_gradient import bias_gradient, bias_gradient_parts
from .feature_gradient import feature_gradient
from .gradient_state import gradient_state
from .launch import Problem, block, has_linear_term, is_long, launch, strides
from .launch_forward import Forward, Tables
from .tile_table import patches, tile_count, tile_for
from .value_gradient import value_gradient

Stats = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # shift, delta, ratio: B, K, N each


def run_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    p: Problem,
    forward: Forward,
    g: torch.Tensor,
    d_v: torch.Tensor,
    bias_grad: bool,
    log_den_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of phi_q, phi_k, bias and far, and that of v into d_v; six launches, four without a bias gradient."""
    tables = forward.tables
    delta, ratio = (torch.empty_like(forward.den) for _ in range(2))
    d_state = torch.empty_like(tables.state)
    _run_gradient_state(phi_q, g, p, forward, log_den_grad, delta, ratio, d_state)
    stats = forward.shift, delta, ratio
    long = is_long(phi_q, phi_k, v, g, d_v)
    d_q = _run_feature_gradient(True, g, v, phi_k, tables.state, p, tables, stats, long)
    d_k = _run_feature_gradient(False, v, g, phi_q, d_state, p, tables, stats, long)
    _run_value_gradient(phi_q, phi_k, g, p, tables, stats, d_state, d_v, long)
    d_bias = d_far = None
    if bias_grad and bias is not None:
        d_bias, d_far = _run_bias_gradient(phi_q, phi_k, v, g, bias, far, p, tables, stats, long)
        beyond = any(radius < size - 1 for radius, size in zip(p.radius, p.grid))
        if d_far is not None and log_den_grad is not None and beyond:
            # the kernel takes all gradients of a head to add up to zero, but a constant in its bias is one in log den
            d_far += log_den_grad.sum((0, 2))
    return d_q, d_k, d_bias, d_far


def _run_gradient_state(
    phi_q: torch.Tensor,
    g: torch.Tensor,
    p: Problem,
    forward: Forward,
    log_den_grad: torch.Tensor | None,
    delta: torch.Tensor,
    ratio: torch.Tensor,
    d_state: torch.Tensor,
) -> None:
    (b, k, n, m), d, linear = phi_q.shape, g.shape[-1], has_linear_term(p)
    tile = tile_for('gradient_state', g, m)
    block_m = min(block(m), tile.features)
    chunks = triton.cdiv(m, block_m) if linear else 1
    parts = max(1, forward.tables.parts) if linear else triton.cdiv(n, 64)
    launch(
        gradient_state,
        parts * chunks * b * k,
        phi_q,
        g,
        forward.z,
        forward.den,
        forward.shift,
        forward.den if log_den_grad is None else log_den_grad,
        forward.tables.heads,
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
        chunks,
        BIAS=p.bias,
        LINEAR=linear,
        LOG_DEN=log_den_grad is not None,
        BLOCK_N=tile.own,
        BLOCK_M=block_m,
        BLOCK_D=block(d),
        PRECISION=p.precision,
        LONG=is_long(phi_q, g, forward.z),
        num_warps=tile.warps,
    )


def _run_feature_gradient(
    of_queries: bool,
    own: torch.Tensor,
    other: torch.Tensor,
    phi: torch.Tensor,
    state: torch.Tensor,
    p: Problem,
    tables: Tables,
    stats: Stats,
    long: bool,
) -> torch.Tensor:
    (b, k, n, m), d = phi.shape, own.shape[-1]
    tile = tile_for('feature_gradient', own, m, p)
    rows, cols, other_rows, other_cols = patches(tile, p)
    tiles, block_m = tile_count(p, rows, cols), min(block(m), tile.features)
    chunks = triton.cdiv(m, block_m)
    out = torch.empty(b, k, n, m, dtype=torch.float32, device=phi.device)
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
        k,
        n,
        m,
        d,
        *p.grid,
        *p.radius,
        tables.log_c.shape[1],
        tiles,
        tables.parts,
        chunks,
        BIAS=p.bias,
        CAUSAL=p.causal,
        OF_QUERIES=of_queries,
        R_ROWS=rows,
        R_COLS=cols,
        C_ROWS=other_rows,
        C_COLS=other_cols,
        BLOCK_M=block_m,
        BLOCK_D=block(d),
        PRECISION=p.precision,
        LONG=long or is_long(out),
        num_warps=tile.warps,
    )
    return out


def _run_value_gradient(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    g: torch.Tensor,
    p: Problem,
    tables: Tables,
    stats: Stats,
    d_state: torch.Tensor,
    d_v: torch.Tensor,
    long: bool,
) -> None:
    (b, k, n, m), d = phi_q.shape, g.shape[-1]
    tile = tile_for('value_gradient', g, m, p)
    rows, cols, other_rows, other_cols = patches(tile, p)
    tiles, block_m = tile_count(p, rows, cols), min(block(m), tile.features)
    shift, _, ratio = stats
    launch(
        value_gradient,
        tiles * b * k,
        phi_q,
        phi_k,
        g,
        tables.log_c,
        tables.heads,
        shift,
        ratio,
        d_state,
        d_v,
        *strides(phi_q),
        *strides(phi_k),
        *strides(g),
        *strides(d_v),
        k,
        n,
        m,
        d,
        *p.grid,
        *p.radius,
        tables.log_c.shape[1],
        tiles,
        tables.parts,
        BIAS=p.bias,
        CAUSAL=p.causal,
        R_ROWS=rows,
        R_COLS=cols,
        C_ROWS=other_rows,
        C_COLS=other_cols,
        BLOCK_M=block_m,
        CHUNKS=triton.cdiv(m, block_m),
        BLOCK_D=block(d),
        PRECISION=p.precision,
        LONG=long,
        num_warps=tile.warps,
    )


def _run_bias_gradient(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    bias: torch.Tensor,
    far: torch.Tensor | None,
    p: Problem,
    tables: Tables,
    stats: Stats,
    long: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    (b, k, n, m), d = phi_q.shape, v.shape[-1]
    tile = tile_for('bias_gradient_parts', v, m)
    block_m = min(block(m), tile.features)
    height, width = p.grid
    block_x = 16 if width <= 16 else tile.own
    reach = min(triton.cdiv(p.radius[1] + block_x - 1, block_x), triton.cdiv(width, block_x))
    reach_y = min(p.radius[0], height - 1)
    diagonals = 2 * reach + 1
    programs = k * (2 * reach_y + 1) * diagonals
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
        height,
        width,
        *p.radius,
        tables.log_c.shape[1],
        reach_y,
        diagonals,
        splits,
        BIAS=p.bias,
        CAUSAL=p.causal,
        BLOCK_X=block_x,
        DIAGONALS=tile.other,
        BLOCK_M=block_m,
        CHUNKS=triton.cdiv(m, block_m),
        BLOCK_D=min(block(d), 64),
        D_CHUNKS=triton.cdiv(d, 64),
        PRECISION=p.precision,
        LONG=long,
        num_warps=tile.warps,
    )
    d_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    d_far = None if far is None else torch.empty_like(far)
    count = triton.cdiv(bias[0].numel(), 256)
    launch(
        bias_gradient,
        k * count,
        scratch,
        tables.heads,
        d_bias,
        d_bias if far is None else d_far,
        *p.radius,
        reach_y,
        diagonals,
        splits,
        count,
        int(p.radius[0] >= height - 1 and p.radius[1] >= width - 1),
        WINDOW=far is not None,
        BLOCK_X=block_x,
        BLOCK=256,
        num_warps=4,
    )
    return d_bias, d_far
