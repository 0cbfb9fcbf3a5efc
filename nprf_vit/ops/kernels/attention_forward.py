"""Forward attention: one program per tile of queries walks over the keys. One launch.

# B batch, K heads, N tokens, M features, D head dim, H×W grid; Q queries and J keys per tile
# phi_q, phi_k (B, K, N, M) float32, v (B, K, N, D), z as v, each by strides of batch, head and token
# c, log_c (K, T) and heads (K, 4) from `prepare`; den, shift (B, K, N): Σ_j c_ij s_ij = den·2^shift

Plain PyTorch: s = phi_q @ phi_k.transpose(-1, -2) * C; z = s @ v / s.sum(-1).

Two ways, chosen on the device. Narrow: one scale per head, c read from its table, no exponential and no maximum. Wide:
each row is scaled by its own largest log2(s) + log2(c), as in FlashAttention; for biases that span more than e^20, for
tiles in which a denominator comes out below 1e-30, and for tiles of a window in which most of c_far Σ_j s_ij was taken
away again: what is left has the rounding of the whole.
"""

import triton
import triton.language as tl

from .prepare import C_FAR, FAR, HEAD_ROW, LOST, WIDE
from .tiles import flat_tile, grid_tile, half_dot, load_rows, lookup, store_rows, visible

_SMALL: tl.constexpr = tl.constexpr(1e-30)
_TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
# How many times its denominator a row's c_far Σ_j s_ij may be: roundings to 2^-11 or 2^-8 then grow to four times, and
# float32's own, which three TF32 products keep, to 2^10 times what they are.
_COARSE: tl.constexpr = tl.constexpr(4.0)
_FINE: tl.constexpr = tl.constexpr(1024.0)


@triton.jit
def _scores(
    queries,
    q_base,
    q_stride,
    q_tokens,
    q_exists,
    q_scale,
    k_base,
    k_stride,
    k_tokens,
    k_exists,
    m,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):
    """φq·φk (Q, J) and, when SCALED, log2 of the keys' scales; beyond one chunk queries are read again each time."""
    k_scale = tl.zeros_like(k_tokens).to(tl.float32) + 1.0
    if SCALED:
        k_scale = tl.zeros_like(k_tokens).to(tl.float32)
        for chunk in range(CHUNKS):
            keys = load_rows(k_base, k_tokens, k_exists, k_stride, chunk * BLOCK_M, m, BLOCK_M, LONG)
            k_scale = tl.maximum(k_scale, tl.max(tl.abs(keys), 1))
        k_scale = tl.where(k_scale > 0, k_scale, 1.0)
    s = tl.zeros([q_tokens.shape[0], k_tokens.shape[0]], tl.float32)
    for chunk in range(CHUNKS):
        if CHUNKS > 1:
            queries = load_rows(q_base, q_tokens, q_exists, q_stride, chunk * BLOCK_M, m, BLOCK_M, LONG)
            if SCALED:
                queries = queries / q_scale[:, None]
        keys = load_rows(k_base, k_tokens, k_exists, k_stride, chunk * BLOCK_M, m, BLOCK_M, LONG)
        if SCALED:
            keys = keys / k_scale[:, None]
        s = tl.dot(queries, tl.trans(keys), s, input_precision=PRECISION)
    return s, tl.log2(k_scale)


@triton.jit
def _times_values(
    p, acc, v_base, tokens, exists, stride, d, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr
):
    """acc + p·v. float16 goes through TF32, which has its digits and float32's range: p has no row maximum of one."""
    values = load_rows(v_base, tokens, exists, stride, 0, d, BLOCK_D, LONG)
    if v_base.dtype.element_ty == tl.bfloat16:
        return half_dot(p.to(tl.bfloat16), values, acc)
    return tl.dot(p, values.to(tl.float32), acc, input_precision=PRECISION)


@triton.jit
def attention_forward(
    phi_q,
    phi_k,
    v,
    c,
    log_c,
    heads,
    state,
    z,
    den,
    shift,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    z_stride_b,
    z_stride_h,
    z_stride_n,
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
    BIAS: tl.constexpr,  # 'none', 'full' or 'window'
    CAUSAL: tl.constexpr,
    POSITIVE: tl.constexpr,
    Q_ROWS: tl.constexpr,
    Q_COLS: tl.constexpr,
    K_ROWS: tl.constexpr,
    K_COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):
    # a causal window has no sum over all keys to add: it walks over all earlier ones
    LOCAL: tl.constexpr = BIAS == 'window' and not CAUSAL
    LINEAR: tl.constexpr = BIAS != 'full' and not CAUSAL
    BLOCK_Q: tl.constexpr = Q_ROWS * Q_COLS
    BLOCK_K: tl.constexpr = K_ROWS * K_COLS
    pid = tl.program_id(0)
    tile, item = pid % tiles, pid // tiles
    b, h = (item // num_heads).to(tl.int64), (item % num_heads).to(tl.int64)
    q_base = phi_q + b * q_stride_b + h * q_stride_h
    k_base = phi_k + b * k_stride_b + h * k_stride_h
    v_base = v + b * v_stride_b + h * v_stride_h
    z_base = z + b * z_stride_b + h * z_stride_h
    table, log_table = c + h * entries, log_c + h * entries
    top, left = 0, 0
    if LOCAL:
        across = tl.cdiv(width, Q_COLS)
        top, left = tile // across * Q_ROWS, tile % across * Q_COLS
        q_tokens, q_exists = grid_tile(top, left, height, width, Q_ROWS, Q_COLS)
    else:
        q_tokens, q_exists = flat_tile(tile, n, BLOCK_Q)
    queries = load_rows(q_base, q_tokens, q_exists, q_stride_n, 0, m, BLOCK_M, LONG)

    log_far, c_far, wide = 0.0, 1.0, 0.0
    if BIAS != 'none':
        wide = tl.load(heads + h * HEAD_ROW + WIDE)
    if BIAS == 'window':
        log_far = tl.load(heads + h * HEAD_ROW + FAR)
        c_far = tl.load(heads + h * HEAD_ROW + C_FAR)
    last = n
    if CAUSAL:
        last = tl.minimum(n, (tile + 1) * BLOCK_Q)

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    scale = tl.zeros([BLOCK_Q], tl.float32)  # log2 of the factor between this sum and that of c·s
    redo = wide > 0
    if not redo:
        if LINEAR:
            for part in range(0, parts):
                for chunk in range(CHUNKS):
                    if CHUNKS > 1:
                        queries = load_rows(q_base, q_tokens, q_exists, q_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
                    features, columns = chunk * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
                    rows = state + ((item.to(tl.int64) * parts + part) * m + features) * (d + 1)
                    mask = (features < m)[:, None] & (columns < d)[None, :]
                    sums = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)
                    counts = tl.load(rows + d, mask=features < m, other=0.0)
                    acc = tl.dot(queries, sums, acc, input_precision=PRECISION)
                    total += tl.sum(queries * counts[None, :], 1)
            acc, total = acc * c_far, total * c_far
        everything = total
        if LOCAL:
            first_y, first_x = tl.maximum(top - radius_y, 0), tl.maximum(left - radius_x, 0)
            end_y = tl.minimum(top + Q_ROWS + radius_y, height)
            end_x = tl.minimum(left + Q_COLS + radius_x, width)
            k_across = tl.cdiv(end_x - first_x, K_COLS)
            steps = tl.cdiv(end_y - first_y, K_ROWS) * k_across
        elif LINEAR:
            first_y, first_x, k_across, steps = 0, 0, 1, 0
        else:
            first_y, first_x, k_across, steps = 0, 0, 1, tl.cdiv(last, BLOCK_K)
        for i in range(0, steps):
            if LOCAL:
                k_top, k_left = first_y + i // k_across * K_ROWS, first_x + i % k_across * K_COLS
                k_tokens, k_exists = grid_tile(k_top, k_left, height, width, K_ROWS, K_COLS)
            else:
                k_tokens, k_exists = flat_tile(i, n, BLOCK_K)
            s, _ = _scores(
                queries, q_base, q_stride_n, q_tokens, q_exists, scale, k_base, k_stride_n, k_tokens, k_exists, m,
                False, BLOCK_M, CHUNKS, PRECISION, LONG,
            )  # fmt: skip
            seen = visible(q_tokens, q_exists, k_tokens, k_exists, CAUSAL, True)
            if BIAS != 'none':
                weight = lookup(table, c_far, q_tokens, k_tokens, seen, width, radius_y, radius_x, BIAS == 'full', True)
                s = s * (weight - c_far if LOCAL else weight)
            if CAUSAL:
                s = tl.where(seen, s, 0.0)
            total += tl.sum(s, 1)
            acc = _times_values(s, acc, v_base, k_tokens, k_exists, v_stride_n, d, BLOCK_D, PRECISION, LONG)
        if POSITIVE:
            redo = tl.min(tl.where(q_exists, total, 1.0), 0) < _SMALL
            if LOCAL:
                COARSE: tl.constexpr = PRECISION == 'tf32' or v.dtype.element_ty != tl.float32
                LIMIT: tl.constexpr = _COARSE if COARSE else _FINE
                lost = tl.max(tl.where(q_exists, everything - LIMIT * total, 0.0), 0) > 0
                if lost:  # every program writes the same
                    tl.store(heads + h * HEAD_ROW + LOST, 1.0)
                redo = redo | lost
    if redo:
        acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        row_max = tl.full([BLOCK_Q], float('-inf'), tl.float32)
        q_scale = tl.zeros([BLOCK_Q], tl.float32)
        for chunk in range(CHUNKS):
            part_q = load_rows(q_base, q_tokens, q_exists, q_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
            q_scale = tl.maximum(q_scale, tl.max(tl.abs(part_q), 1))
        q_scale = tl.where(q_scale > 0, q_scale, 1.0)
        scaled = queries / q_scale[:, None]
        for i in range(0, tl.cdiv(last, BLOCK_K)):
            k_tokens, k_exists = flat_tile(i, n, BLOCK_K)
            s, log_scale = _scores(
                scaled, q_base, q_stride_n, q_tokens, q_exists, q_scale, k_base, k_stride_n, k_tokens, k_exists, m,
                True, BLOCK_M, CHUNKS, PRECISION, LONG,
            )  # fmt: skip
            seen = visible(q_tokens, q_exists, k_tokens, k_exists, CAUSAL, True)
            logs = tl.zeros_like(s) + log_scale[None, :]
            if BIAS != 'none':
                logs += lookup(
                    log_table, log_far, q_tokens, k_tokens, seen, width, radius_y, radius_x, BIAS == 'full', True
                )
            if POSITIVE:
                logs += tl.where(s > 0, tl.log2(tl.maximum(s, _TINY)), float('-inf'))
            else:  # a zero key's bias is no row's maximum
                logs = tl.where(s == 0, float('-inf'), logs)
            logs = tl.where(seen, logs, float('-inf'))
            new_max = tl.maximum(row_max, tl.max(logs, 1))
            safe_max = tl.where(new_max == float('-inf'), 0.0, new_max)
            rescale = tl.exp2(row_max - safe_max)
            p = tl.exp2(logs - safe_max[:, None])
            if not POSITIVE:
                p = p * s
            total = total * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            acc = _times_values(p, acc, v_base, k_tokens, k_exists, v_stride_n, d, BLOCK_D, PRECISION, LONG)
            row_max = new_max
        scale = tl.where(row_max == float('-inf'), 0.0, row_max) + tl.log2(q_scale)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    store_rows(z_base, q_tokens, q_exists, z_stride_n, 0, d, acc, BLOCK_D, LONG)
    rows = item.to(tl.int64) * n + q_tokens
    tl.store(den + rows, total, mask=q_exists)
    tl.store(shift + rows, scale, mask=q_exists)
