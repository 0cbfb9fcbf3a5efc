"""Gradient of the values: a program per tile of keys walks over the queries. One launch.

Symbols as in gradient_pairs.py. Plain PyTorch: autograd of `attention_forward`'s. Scores are computed again.
"""

import triton
import triton.language as tl

from .gradient_pairs import load_state, other_tiles, other_tokens, pair_weights
from .prepare import FAR, HEAD_ROW, LOST, WIDE
from .tiles import flat_tile, grid_tile, half_dot, load_rows, store_rows


@triton.jit
def value_gradient(
    phi_q,
    phi_k,
    g,
    log_c,
    heads,
    shift,
    ratio,
    state,
    out,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    g_stride_b,
    g_stride_h,
    g_stride_n,
    o_stride_b,
    o_stride_h,
    o_stride_n,
    num_heads,
    n,
    m,
    d,
    height,
    width,
    radius_y,
    radius_x,
    entries,
    tiles,
    parts,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    R_ROWS: tl.constexpr,
    R_COLS: tl.constexpr,
    C_ROWS: tl.constexpr,
    C_COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):
    """dv: rows are keys, columns queries; `state` is d_state."""
    LOCAL: tl.constexpr = BIAS == 'window' and not CAUSAL
    LINEAR: tl.constexpr = BIAS != 'full' and not CAUSAL
    BLOCK_R: tl.constexpr = R_ROWS * R_COLS
    pid = tl.program_id(0)
    tile, item = pid % tiles, pid // tiles
    b, h = (item // num_heads).to(tl.int64), (item % num_heads).to(tl.int64)
    q_base = phi_q + b * q_stride_b + h * q_stride_h
    k_base = phi_k + b * k_stride_b + h * k_stride_h
    g_base = g + b * g_stride_b + h * g_stride_h
    o_base = out + b * o_stride_b + h * o_stride_h
    log_table = log_c + h * entries
    stats = item.to(tl.int64) * n
    top, left = 0, 0
    if LOCAL:
        over = tl.cdiv(width, R_COLS)
        top, left = tile // over * R_ROWS, tile % over * R_COLS
        tokens, exists = grid_tile(top, left, height, width, R_ROWS, R_COLS)
    else:
        tokens, exists = flat_tile(tile, n, BLOCK_R)
    log_far, local = 0.0, True
    if BIAS == 'window':
        log_far = tl.load(heads + h * HEAD_ROW + FAR)
    if LOCAL:
        local = tl.load(heads + h * HEAD_ROW + WIDE) + tl.load(heads + h * HEAD_ROW + LOST) == 0
    keys = load_rows(k_base, tokens, exists, k_stride_n, 0, m, BLOCK_M, LONG)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if LINEAR:
        if local:
            for part in range(0, parts):
                for chunk in range(CHUNKS):
                    if CHUNKS > 1:
                        keys = load_rows(k_base, tokens, exists, k_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
                    sums, _ = load_state(state, item, part, parts, chunk * BLOCK_M, m, d, BLOCK_M, BLOCK_D)
                    acc = tl.dot(keys, sums, acc, input_precision=PRECISION)
    first_y, first_x, across, begin, end = other_tiles(
        tile, top, left, n, height, width, radius_y, radius_x, local,
        CAUSAL, False, LOCAL, BLOCK_R, R_ROWS, R_COLS, C_ROWS, C_COLS,
    )  # fmt: skip
    if LINEAR and not LOCAL:
        end = 0
    for i in range(begin, end):
        others, there = other_tokens(i, first_y, first_x, across, n, height, width, local, LOCAL, C_ROWS, C_COLS)
        s = tl.zeros([BLOCK_R, C_ROWS * C_COLS], tl.float32)
        for chunk in range(CHUNKS):
            if CHUNKS > 1:
                keys = load_rows(k_base, tokens, exists, k_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
            queries = load_rows(q_base, others, there, q_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
            s = tl.dot(keys, tl.trans(queries), s, input_precision=PRECISION)
        r_other = tl.load(ratio + stats + others, mask=there, other=0.0)
        s_other = tl.load(shift + stats + others, mask=there, other=0.0)
        s = s * pair_weights(
            log_table, log_far, others, there, tokens, exists, s_other, r_other, local and LOCAL,
            width, radius_y, radius_x, BIAS, CAUSAL, False,
        )  # fmt: skip
        grads = load_rows(g_base, others, there, g_stride_n, 0, d, BLOCK_D, LONG)
        if grads.dtype == tl.float32:
            acc = tl.dot(s, grads, acc, input_precision=PRECISION)
        else:  # normalized weights are at most one: half precision holds them
            acc = half_dot(s.to(grads.dtype), grads, acc)
    store_rows(o_base, tokens, exists, o_stride_n, 0, d, acc, BLOCK_D, LONG)
