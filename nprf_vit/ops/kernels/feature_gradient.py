"""Gradients of features: a program per tile of rows and chunk of features walks over the columns. One launch each.

Symbols as in gradient_pairs.py. Plain PyTorch: autograd of `attention_forward`'s. Scores are computed again.
"""

import triton
import triton.language as tl

from .gradient_pairs import LARGEST, load_state, other_tiles, other_tokens, pair_weights, value_dot
from .prepare import C_FAR, FAR, HEAD_ROW, LOST, WIDE
from .tiles import flat_tile, grid_tile, load_rows, store_rows


@triton.jit
def feature_gradient(
    rows_x,
    cols_x,
    cols_phi,
    log_c,
    heads,
    shift,
    delta,
    ratio,
    state,
    out,
    a_stride_b,
    a_stride_h,
    a_stride_n,
    b_stride_b,
    b_stride_h,
    b_stride_n,
    x_stride_b,
    x_stride_h,
    x_stride_n,
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
    chunks,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    OF_QUERIES: tl.constexpr,
    R_ROWS: tl.constexpr,
    R_COLS: tl.constexpr,
    C_ROWS: tl.constexpr,
    C_COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):
    """A chunk of dφq (rows are queries with g, columns keys with v and φk), or of dφk, the other way round.

    `state` is the forward's for queries and d_state for keys.
    """
    LOCAL: tl.constexpr = BIAS == 'window' and not CAUSAL
    LINEAR: tl.constexpr = BIAS != 'full' and not CAUSAL
    BLOCK_R: tl.constexpr = R_ROWS * R_COLS
    pid = tl.program_id(0)
    tile, chunk, item = pid % tiles, pid // tiles % chunks, pid // (tiles * chunks)
    b, h = (item // num_heads).to(tl.int64), (item % num_heads).to(tl.int64)
    a_base = rows_x + b * a_stride_b + h * a_stride_h
    b_base = cols_x + b * b_stride_b + h * b_stride_h
    x_base = cols_phi + b * x_stride_b + h * x_stride_h
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
    log_far, c_far, local = 0.0, 1.0, True
    if BIAS == 'window':
        log_far = tl.load(heads + h * HEAD_ROW + FAR)
    if LOCAL:
        c_far = tl.load(heads + h * HEAD_ROW + C_FAR)
        local = tl.load(heads + h * HEAD_ROW + WIDE) + tl.load(heads + h * HEAD_ROW + LOST) == 0
    rows = load_rows(a_base, tokens, exists, a_stride_n, 0, d, BLOCK_D, LONG)
    if OF_QUERIES:
        own_delta = tl.load(delta + stats + tokens, mask=exists, other=0.0)
        own_ratio = tl.load(ratio + stats + tokens, mask=exists, other=0.0)
        own_shift = tl.load(shift + stats + tokens, mask=exists, other=0.0)
    acc = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
    if LINEAR:
        if local:
            for part in range(0, parts):
                sums, last = load_state(state, item, part, parts, chunk * BLOCK_M, m, d, BLOCK_M, BLOCK_D)
                acc = tl.dot(rows.to(tl.float32), tl.trans(sums), acc, input_precision=PRECISION)
                if OF_QUERIES:
                    acc -= own_delta[:, None] * last[None, :]
                else:
                    acc += last[None, :]
            if OF_QUERIES:
                factor = c_far * own_ratio * tl.exp2(tl.minimum(-own_shift, LARGEST))
                acc = acc * factor[:, None]
    first_y, first_x, across, begin, end = other_tiles(
        tile, top, left, n, height, width, radius_y, radius_x, local,
        CAUSAL, OF_QUERIES, LOCAL, BLOCK_R, R_ROWS, R_COLS, C_ROWS, C_COLS,
    )  # fmt: skip
    if LINEAR and not LOCAL:
        end = 0
    for i in range(begin, end):
        others, there = other_tokens(i, first_y, first_x, across, n, height, width, local, LOCAL, C_ROWS, C_COLS)
        columns = load_rows(b_base, others, there, b_stride_n, 0, d, BLOCK_D, LONG)
        product = tl.zeros([BLOCK_R, C_ROWS * C_COLS], tl.float32)
        product = value_dot(rows, tl.trans(columns), product, PRECISION)
        if OF_QUERIES:
            weight = pair_weights(
                log_table, log_far, tokens, exists, others, there, own_shift, own_ratio, local and LOCAL,
                width, radius_y, radius_x, BIAS, CAUSAL, True,
            )  # fmt: skip
            product = (product - own_delta[:, None]) * weight
        else:
            d_other = tl.load(delta + stats + others, mask=there, other=0.0)
            r_other = tl.load(ratio + stats + others, mask=there, other=0.0)
            s_other = tl.load(shift + stats + others, mask=there, other=0.0)
            weight = pair_weights(
                log_table, log_far, others, there, tokens, exists, s_other, r_other, local and LOCAL,
                width, radius_y, radius_x, BIAS, CAUSAL, False,
            )  # fmt: skip
            product = (product - d_other[None, :]) * weight
        features = load_rows(x_base, others, there, x_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
        acc = tl.dot(product, features, acc, input_precision=PRECISION)
    store_rows(o_base, tokens, exists, o_stride_n, chunk * BLOCK_M, m, acc, BLOCK_M, LONG)
