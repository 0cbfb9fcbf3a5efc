"""What the gradients share: weights of pairs of tokens, and which tiles of the other side a tile meets.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
# g (B, K, N, D) gradient of z; den, shift of the forward; delta_i = g_i·z_i; r_i = 1/den_i, zero where den is
# w_ij = c_ij 2^-shift_i r_i, so that a_ij = s_ij w_ij are the normalized weights. Then
#   dφq_i = Σ_j w_ij (g_i·v_j - delta_i) φk_j       dφk_j = Σ_i w_ij (g_i·v_j - delta_i) φq_i
#   dv_j = Σ_i s_ij w_ij g_i
# A window adds the constant beyond it through d_state = Σ_i f_i φq_i [g_i, -delta_i], f_i = c_far 2^-shift_i r_i.
"""

import triton
import triton.language as tl

from .tiles import flat_tile, grid_tile, half_dot, lookup, visible

# log2 of the largest weight: a zero key's, times a gradient, stays finite; others' are at most 1/s_ij
LARGEST: tl.constexpr = tl.constexpr(100.0)


@triton.jit
def value_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b of two tiles that are gradients or values: in half precision where they are."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision=PRECISION)
    return half_dot(a, b, acc)


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
    weight = tl.exp2(tl.minimum(logs - log_scale, LARGEST))
    if BIAS == 'window' and not CAUSAL:
        if without:
            weight -= tl.exp2(tl.minimum(log_far - log_scale, LARGEST))
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
