"""From tensors to the launches of the forward.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .attention_forward import attention_forward
from .launch import Problem, block, has_linear_term, is_long, launch, strides
from .prepare import prepare
from .tile_table import patches, tile_count, tile_for


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


def run_prepare(
    phi_k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, far: torch.Tensor | None, p: Problem
) -> Tables:
    (b, k, n, m), d = phi_k.shape, v.shape[-1]
    tables = 0 if bias is None else k
    entries = 0 if bias is None else bias[0].numel()
    c, log_c = (v.new_empty(k, entries, dtype=torch.float32) for _ in range(2))
    heads = v.new_empty(tables, 4, dtype=torch.float32)
    parts = p.parts if has_linear_term(p) else 0
    tile = tile_for('prepare', v, m)
    block_m = min(block(m), tile.features)
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
            BLOCK_N=tile.own,
            BLOCK_M=block_m,
            BLOCK_D=block(d),
            PRECISION=p.precision,
            LONG=is_long(phi_k, v),
            num_warps=tile.warps,
        )
    return Tables(c, log_c, heads, state, parts)


def run_forward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    p: Problem,
    z: torch.Tensor,
) -> Forward:
    """Attention into z; two launches, one where there is neither a bias nor a linear term."""
    (b, k, n, m), d = phi_q.shape, v.shape[-1]
    tables = run_prepare(phi_k, v, bias, far, p)
    den, shift = (v.new_empty(b, k, n, dtype=torch.float32) for _ in range(2))
    tile = tile_for('attention_forward', v, m, p)
    q_rows, q_cols, k_rows, k_cols = patches(tile, p)
    tiles = tile_count(p, q_rows, q_cols)
    block_m = min(block(m), tile.features)
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
        num_warps=tile.warps,
    )
    return Forward(z, den, shift, tables)
