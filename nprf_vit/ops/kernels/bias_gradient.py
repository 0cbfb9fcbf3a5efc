"""Gradient of the bias: db_δ = Σ over pairs at offset δ, and over the batch, of a_ij (g_i·v_j - delta_i). Two launches.

# B batch, K heads, N tokens, M features, D head dim, H×W grid, table of offsets up to ±RY, ±RX
# A program owns the pairs of one head, one dy and one diagonal of tiles: queries x in [t·X, (t+1)·X) with keys in
# [(t+e)·X, (t+e+1)·X), for a fixed e and all t, rows y and batch items. They all have the same 2X-1 offsets dx, so one
# X×X array in registers takes them all; its diagonals are summed at the end. Nothing is added by two programs, and
# every sum has a fixed order: the result is the same in every run. Scratch: (K, dy, 2E+1, splits, 2X) numbers.

Plain PyTorch: index_add of a·(g·v - delta) by offset.
"""

import triton
import triton.language as tl

from .gradient_pairs import pair_weights, value_dot
from .prepare import FAR, HEAD_ROW
from .tiles import load_rows


@triton.jit
def bias_gradient_parts(
    phi_q,
    phi_k,
    v,
    g,
    log_c,
    heads,
    shift,
    delta,
    ratio,
    scratch,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    g_stride_b,
    g_stride_h,
    g_stride_n,
    batch,
    num_heads,
    n,
    m,
    d,
    height,
    width,
    radius_y,
    radius_x,
    entries,
    reach_y,
    diagonals,
    splits,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_X: tl.constexpr,
    DIAGONALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    D_CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):
    """scratch[head, dy, diagonal, split]: 2X-1 sums by dx and, last, their total. A split is a part of the batch."""
    pid = tl.program_id(0)
    split, diagonal = pid % splits, pid // splits % diagonals
    dy = pid // (splits * diagonals) % (2 * reach_y + 1) - reach_y
    h = (pid // (splits * diagonals * (2 * reach_y + 1))).to(tl.int64)
    e = diagonal - diagonals // 2
    log_table, log_far = log_c + h * entries, 0.0
    if BIAS == 'window':
        log_far = tl.load(heads + h * HEAD_ROW + FAR)
    i = tl.arange(0, BLOCK_X)
    total = tl.zeros([BLOCK_X, BLOCK_X], tl.float32)
    across = tl.cdiv(width, BLOCK_X)
    first_t, last_t = tl.maximum(0, -e), tl.minimum(across, across - e)
    first_y, last_y = tl.maximum(0, -dy), tl.minimum(height, height - dy)
    share = tl.cdiv(batch, splits)
    per_item = tl.maximum(last_t - first_t, 0) * tl.maximum(last_y - first_y, 0)
    items = tl.maximum(tl.minimum(share, batch - split * share), 0)
    for step in range(0, per_item * items):
        b = (split * share + step // per_item).to(tl.int64)
        y = first_y + step % per_item // (last_t - first_t)
        t = first_t + step % (last_t - first_t)
        q_x, k_x = t * BLOCK_X + i, (t + e) * BLOCK_X + i
        q_tokens, k_tokens = y * width + q_x, (y + dy) * width + k_x
        q_exists, k_exists = q_x < width, k_x < width
        stats = (b * num_heads + h) * n
        inverse = tl.load(ratio + stats + q_tokens, mask=q_exists, other=0.0)
        log_scale = tl.load(shift + stats + q_tokens, mask=q_exists, other=0.0)
        dots = tl.load(delta + stats + q_tokens, mask=q_exists, other=0.0)
        q_base = phi_q + b * q_stride_b + h * q_stride_h
        k_base = phi_k + b * k_stride_b + h * k_stride_h
        s = tl.zeros([BLOCK_X, BLOCK_X], tl.float32)
        for chunk in range(CHUNKS):
            queries = load_rows(q_base, q_tokens, q_exists, q_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
            keys = load_rows(k_base, k_tokens, k_exists, k_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
            s = tl.dot(queries, tl.trans(keys), s, input_precision=PRECISION)
        v_base, g_base = v + b * v_stride_b + h * v_stride_h, g + b * g_stride_b + h * g_stride_h
        product = tl.zeros([BLOCK_X, BLOCK_X], tl.float32)
        for part in range(D_CHUNKS):
            values = load_rows(v_base, k_tokens, k_exists, v_stride_n, part * BLOCK_D, d, BLOCK_D, LONG)
            grads = load_rows(g_base, q_tokens, q_exists, g_stride_n, part * BLOCK_D, d, BLOCK_D, LONG)
            product = value_dot(grads, tl.trans(values), product, PRECISION)
        weight = pair_weights(
            log_table, log_far, q_tokens, q_exists, k_tokens, k_exists, log_scale, inverse, False,
            width, radius_y, radius_x, BIAS, CAUSAL, True,
        )  # fmt: skip
        total += s * weight * (product - dots[:, None])
    dx = e * BLOCK_X + i[None, :] - i[:, None]
    total = tl.where((dx <= radius_x) & (dx >= -radius_x), total, 0.0)
    out = scratch + pid.to(tl.int64) * (2 * BLOCK_X)
    for first in range(0, 2 * BLOCK_X, DIAGONALS):
        offset = first + tl.arange(0, DIAGONALS)
        # the last of the 2X numbers is the total
        mine = (i[None, :] - i[:, None])[None, :, :] == (offset - (BLOCK_X - 1))[:, None, None]
        mine |= (offset == 2 * BLOCK_X - 1)[:, None, None]
        tl.store(out + offset, tl.sum(tl.sum(tl.where(mine, total[None, :, :], 0.0), 2), 1))


@triton.jit
def bias_gradient(
    scratch,
    heads,
    d_bias,
    d_far,
    radius_y,
    radius_x,
    reach_y,
    diagonals,
    splits,
    blocks,
    covered,
    WINDOW: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up what belongs to each offset: at most two diagonals of tiles, and the splits of the batch.

    With a window also d_far. A constant added to every offset changes nothing, so all gradients of a head add up to
    zero, and the one beyond the window is minus the sum of those inside: exactly zero where nothing lies beyond
    (`covered`), or nothing has weight there. Not where c is zero: rows that see no key at its maximum have their own.
    """
    pid = tl.program_id(0)
    part, h = pid % blocks, (pid // blocks).to(tl.int64)
    table_width, table_height = 2 * radius_x + 1, 2 * radius_y + 1
    entries = table_width * table_height
    entry = part * BLOCK + tl.arange(0, BLOCK)
    dy, dx = entry // table_width - radius_y + reach_y, entry % table_width - radius_x
    exists, occurs = entry < entries, (entry < entries) & (dy >= 0) & (dy <= 2 * reach_y)
    total = tl.zeros([BLOCK], tl.float32)
    lower = (dx + radius_x + BLOCK_X) // BLOCK_X - (radius_x + BLOCK_X) // BLOCK_X  # near ⌊dx/X⌋
    for near in range(-1, 3):
        e = lower + near
        offset = dx - e * BLOCK_X + BLOCK_X - 1
        diagonal = e + diagonals // 2
        mask = occurs & (offset >= 0) & (offset < 2 * BLOCK_X - 1) & (diagonal >= 0) & (diagonal < diagonals)
        row = (h * (2 * reach_y + 1) + dy) * diagonals + diagonal
        for split in range(0, splits):
            total += tl.load(scratch + (row * splits + split) * (2 * BLOCK_X) + offset, mask=mask, other=0.0)
    tl.store(d_bias + h * entries + entry, total, mask=exists)
    if WINDOW:
        if part == 0:
            rows = (2 * reach_y + 1) * diagonals * splits
            far = tl.zeros([BLOCK], tl.float32)
            for first in range(0, rows, BLOCK):
                row = first + tl.arange(0, BLOCK)
                at = (h * rows + row) * (2 * BLOCK_X) + 2 * BLOCK_X - 1
                far += tl.load(scratch + at, mask=row < rows, other=0.0)
            nothing = (covered > 0) | (tl.load(heads + h * HEAD_ROW + FAR) == float('-inf'))
            tl.store(d_far + h, tl.where(nothing, 0.0, -tl.sum(far, 0)))
