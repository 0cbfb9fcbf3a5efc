"""One launch before the attention: weights c = exp(b - max) of each head's table, and the sums of the linear term.

# B batch, K heads, N tokens, M features, D head dim; T entries of a table
# Programs 0 to K-1 take a table each; the others a part of the tokens, a chunk of features and a (batch, head) each.

Plain PyTorch: c = exp(bias - bias.amax()), state = phi_k.transpose(-1, -2) @ [v, 1].
"""

import triton
import triton.language as tl

from .tiles import load_rows

# What a head's row of `heads` holds.
LOST: tl.constexpr = tl.constexpr(0)  # 1 where the forward lost digits to c_far; written there, read by the backward
FAR: tl.constexpr = tl.constexpr(1)  # log2 of c beyond the window
C_FAR: tl.constexpr = tl.constexpr(2)  # c beyond the window
WIDE: tl.constexpr = tl.constexpr(3)  # 1 where c spans too much for one scale per head
HEAD_ROW: tl.constexpr = tl.constexpr(4)

# c of one scale per head spans at most e^20: beyond it rows that see only small c are scaled by themselves.
_RANGE: tl.constexpr = tl.constexpr(20.0)
# A window subtracts c_far inside of it: e^7 of 2^-24 is a quarter of the promised 1e-3.
_FAR_RANGE: tl.constexpr = tl.constexpr(7.0)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _weigh_table(bias, far, c, log_c, heads, head, entries, visible_entries, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """c and log2 c of one head, and its row of `heads`. Entries past `visible_entries` are future offsets."""
    base = head.to(tl.int64) * entries
    high = tl.full([BLOCK], float('-inf'), tl.float32)
    low = tl.full([BLOCK], float('inf'), tl.float32)
    for start in range(0, visible_entries, BLOCK):
        i = start + tl.arange(0, BLOCK)
        b = tl.load(bias + base + i, mask=i < visible_entries, other=0.0)
        high = tl.where(i < visible_entries, tl.maximum(high, b), high)
        low = tl.where(i < visible_entries, tl.minimum(low, b), low)
    top, bottom = tl.max(high, 0), tl.min(low, 0)
    wide, log_far, c_far = 0.0, 0.0, 1.0
    if WINDOW:
        beyond = tl.load(far + head)
        wide = tl.where(beyond - bottom > _FAR_RANGE, 1.0, 0.0)
        top = tl.maximum(top, beyond)
        log_far = (beyond - top) * _LOG2_E
        c_far = tl.exp2(log_far)
    tl.store(heads + head * HEAD_ROW + FAR, log_far)
    tl.store(heads + head * HEAD_ROW + C_FAR, c_far)
    tl.store(heads + head * HEAD_ROW + LOST, 0.0)
    tl.store(heads + head * HEAD_ROW + WIDE, tl.where(top - bottom > _RANGE, 1.0, wide))
    for start in range(0, entries, BLOCK):
        i = start + tl.arange(0, BLOCK)
        b = tl.load(bias + base + i, mask=i < visible_entries, other=float('-inf'))
        scaled = (b - top) * _LOG2_E
        tl.store(log_c + base + i, scaled, mask=i < entries)
        tl.store(c + base + i, tl.exp2(scaled), mask=i < entries)


@triton.jit
def prepare(
    bias,
    far,
    c,
    log_c,
    heads,
    entries,
    visible_entries,
    phi_k,
    v,
    state,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    num_heads,
    n,
    m,
    d,
    tables,
    parts,
    chunks,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):
    """`tables` heads' weights, then state (B·K, parts, M, D+1): Σ_j φ(k_j) [v_j, 1] over a part of the tokens."""
    pid = tl.program_id(0)
    if pid < tables:
        _weigh_table(bias, far, c, log_c, heads, pid, entries, visible_entries, WINDOW, BLOCK)
    else:
        pid -= tables
        chunk, part, item = pid % chunks, pid // chunks % parts, pid // (chunks * parts)
        b, h = (item // num_heads).to(tl.int64), (item % num_heads).to(tl.int64)
        k_base = phi_k + b * k_stride_b + h * k_stride_h
        v_base = v + b * v_stride_b + h * v_stride_h
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        count = tl.zeros([BLOCK_M], tl.float32)
        steps = tl.cdiv(tl.cdiv(n, parts), BLOCK_N)
        for i in range(0, steps):
            tokens = (part * steps + i) * BLOCK_N + tl.arange(0, BLOCK_N)
            keys = load_rows(k_base, tokens, tokens < n, k_stride_n, chunk * BLOCK_M, m, BLOCK_M, LONG)
            values = load_rows(v_base, tokens, tokens < n, v_stride_n, 0, d, BLOCK_D, LONG).to(tl.float32)
            total = tl.dot(tl.trans(keys), values, total, input_precision=PRECISION)
            count += tl.sum(keys, 0)
        features, columns = chunk * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        rows = state + ((item.to(tl.int64) * parts + part) * m + features) * (d + 1)
        mask = (features < m)[:, None] & (columns < d)[None, :]
        tl.store(rows[:, None] + columns[None, :], total, mask=mask)
        tl.store(rows + d, count, mask=features < m)
