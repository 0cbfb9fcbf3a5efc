"""Gradients of features and values: four kernels, each a program per tile of rows that walks over the columns.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
# g (B, K, N, D) gradient of z; den, shift of the forward; delta_i = g_i·z_i; r_i = 1/den_i, zero where den is
# w_ij = c_ij 2^-shift_i r_i, so that a_ij = s_ij w_ij are the normalized weights. Then
#   dφq_i = Σ_j w_ij (g_i·v_j - delta_i) φk_j       dφk_j = Σ_i w_ij (g_i·v_j - delta_i) φq_i
#   dv_j = Σ_i s_ij w_ij g_i
# A window adds the constant beyond it through d_state = Σ_i f_i φq_i [g_i, -delta_i], f_i = c_far 2^-shift_i r_i.

Plain PyTorch: autograd of `attention_forward`'s. Nothing here is quadratic in memory; scores are computed again.
"""

import triton
import triton.language as tl

from .prepare import C_FAR, FAR, HEAD_ROW, WIDE
from .tiles import flat_tile, grid_tile, half_dot, load_rows, lookup, store_rows, visible

_LARGEST: tl.constexpr = tl.constexpr(126.0)  # log2: a weight over a vanishing denominator stays finite


@triton.jit
def value_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b of two tiles that are gradients or values: in half precision where they are."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision=PRECISION)
    return half_dot(a, b, acc)


@triton.jit
def gradient_state(
    phi_q,
    g,
    z,
    den,
    shift,
    heads,
    delta,
    ratio,
    state,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    g_stride_b,
    g_stride_h,
    g_stride_n,
    z_stride_b,
    z_stride_h,
    z_stride_n,
    num_heads,
    n,
    m,
    d,
    parts,
    chunks,
    BIAS: tl.constexpr,
    LINEAR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):
    """delta and r of every query; with LINEAR, d_state (B·K, parts, M, D+1) of a part of the queries."""
    pid = tl.program_id(0)
    chunk, part, item = pid % chunks, pid // chunks % parts, pid // (chunks * parts)
    b, h = (item // num_heads).to(tl.int64), (item % num_heads).to(tl.int64)
    q_base = phi_q + b * q_stride_b + h * q_stride_h
    g_base = g + b * g_stride_b + h * g_stride_h
    z_base = z + b * z_stride_b + h * z_stride_h
    c_far = 1.0
    if BIAS == 'window':
        c_far = tl.load(heads + h * HEAD_ROW + C_FAR)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_M], tl.float32)
    steps = tl.cdiv(tl.cdiv(n, parts), BLOCK_N)
    for i in range(0, steps):
        tokens = (part * steps + i) * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = tokens < n
        grads = load_rows(g_base, tokens, exists, g_stride_n, 0, d, BLOCK_D, LONG).to(tl.float32)
        outputs = load_rows(z_base, tokens, exists, z_stride_n, 0, d, BLOCK_D, LONG).to(tl.float32)
        rows = item.to(tl.int64) * n + tokens
        dot = tl.sum(grads * outputs, 1)
        denominator = tl.load(den + rows, mask=exists, other=0.0)
        inverse = tl.where(denominator == 0, 0.0, 1.0 / tl.where(denominator == 0, 1.0, denominator))
        if chunk == 0:
            tl.store(delta + rows, dot, mask=exists)
            tl.store(ratio + rows, inverse, mask=exists)
        if LINEAR:
            log_scale = tl.load(shift + rows, mask=exists, other=0.0)
            factor = c_far * inverse * tl.exp2(tl.minimum(-log_scale, _LARGEST))
            queries = load_rows(q_base, tokens, exists, q_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
            weighted = queries * factor[:, None]
            total = tl.dot(tl.trans(weighted), grads, total, input_precision=PRECISION)
            count -= tl.sum(weighted * dot[:, None], 0)
    if LINEAR:
        features, columns = chunk * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        out = state + ((item.to(tl.int64) * parts + part) * m + features) * (d + 1)
        mask = (features < m)[:, None] & (columns < d)[None, :]
        tl.store(out[:, None] + columns[None, :], total, mask=mask)
        tl.store(out + d, count, mask=features < m)


@triton.jit
def load_state(state, item, part, parts, first, m, d, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """A part of a state: (BLOCK_M, BLOCK_D) sums and (BLOCK_M,) of its last column."""
    features, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    rows = state + ((item.to(tl.int64) * parts + part) * m + features) * (d + 1)
    mask = (features < m)[:, None] & (columns < d)[None, :]
    sums = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)
    return sums, tl.load(rows + d, mask=features < m, other=0.0)


@triton.jit
def pair_weights(
    log_table,
    log_far,
    q_tokens,
    q_exists,
    k_tokens,
    k_exists,
    log_scale,
    inverse,
    without,
    width,
    radius_y,
    radius_x,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERIES_FIRST: tl.constexpr,
):
    """w_ij, (queries, keys) or (keys, queries); `without`: less the constant beyond the window."""
    seen = visible(q_tokens, q_exists, k_tokens, k_exists, CAUSAL, QUERIES_FIRST)
    if QUERIES_FIRST:
        log_scale, inverse = log_scale[:, None], inverse[:, None]
    else:
        log_scale, inverse = log_scale[None, :], inverse[None, :]
    logs = tl.zeros(seen.shape, tl.float32)
    if BIAS != 'none':
        logs = lookup(
            log_table, log_far, q_tokens, k_tokens, seen, width, radius_y, radius_x, BIAS == 'full', QUERIES_FIRST
        )
    weight = tl.exp2(tl.minimum(logs - log_scale, _LARGEST))
    if BIAS == 'window':
        if without:
            weight -= tl.exp2(tl.minimum(log_far - log_scale, _LARGEST))
    return tl.where(seen, weight * inverse, 0.0)


@triton.jit
def other_tiles(
    tile,
    top,
    left,
    n,
    height,
    width,
    radius_y,
    radius_x,
    local,
    CAUSAL: tl.constexpr,
    ROWS_ARE_QUERIES: tl.constexpr,
    LOCAL: tl.constexpr,
    OWN: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    OWN_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Which tiles of the other side a tile meets: first row and column, tiles per row, first and last index."""
    first_y, first_x, across, begin, end = 0, 0, 1, 0, tl.cdiv(n, ROWS * COLS)
    if CAUSAL:
        if ROWS_ARE_QUERIES:
            end = tl.cdiv(tl.minimum(n, (tile + 1) * OWN), ROWS * COLS)
        else:
            begin = tile * OWN // (ROWS * COLS)
    if LOCAL:
        if local:
            first_y, first_x = tl.maximum(top - radius_y, 0), tl.maximum(left - radius_x, 0)
            end_y = tl.minimum(top + OWN_ROWS + radius_y, height)
            end_x = tl.minimum(left + OWN_COLS + radius_x, width)
            across = tl.cdiv(end_x - first_x, COLS)
            end = tl.cdiv(end_y - first_y, ROWS) * across
    return first_y, first_x, across, begin, end


@triton.jit
def other_tokens(
    i, first_y, first_x, across, n, height, width, local, LOCAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    tokens, exists = flat_tile(i, n, ROWS * COLS)
    if LOCAL:
        if local:
            tokens, exists = grid_tile(
                first_y + i // across * ROWS, first_x + i % across * COLS, height, width, ROWS, COLS
            )
    return tokens, exists


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
        c_far = tl.load(heads + h * HEAD_ROW + C_FAR)
        local = tl.load(heads + h * HEAD_ROW + WIDE) == 0
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
                factor = c_far * own_ratio * tl.exp2(tl.minimum(-own_shift, _LARGEST))
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
        local = tl.load(heads + h * HEAD_ROW + WIDE) == 0
    keys = load_rows(k_base, tokens, exists, k_stride_n, 0, m, BLOCK_M, LONG)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if LINEAR:
        if local:
            for part in range(0, parts):
                for chunk in tl.static_range(CHUNKS):
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
        for chunk in tl.static_range(CHUNKS):
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
