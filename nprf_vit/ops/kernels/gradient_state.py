"""First launch of the backward: delta and r of every query, and the linear term's sums over queries.

Symbols as in gradient_pairs.py. Plain PyTorch: delta = (g * z).sum(-1), less the gradient of log den if it
has one; d_state = phi_q.mT @ (f * [g, -delta]).
"""

import triton
import triton.language as tl

from .gradient_pairs import LARGEST
from .prepare import C_FAR, HEAD_ROW
from .tiles import load_rows


@triton.jit
def gradient_state(
    phi_q,
    g,
    z,
    den,
    shift,
    log_den_grad,
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
    LOG_DEN: tl.constexpr,  # whether log den has a gradient of its own
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
        if LOG_DEN:
            dot -= tl.load(log_den_grad + rows, mask=exists, other=0.0)
        denominator = tl.load(den + rows, mask=exists, other=0.0)
        inverse = tl.where(denominator == 0, 0.0, 1.0 / tl.where(denominator == 0, 1.0, denominator))
        if chunk == 0:
            tl.store(delta + rows, dot, mask=exists)
            tl.store(ratio + rows, inverse, mask=exists)
        if LINEAR:
            log_scale = tl.load(shift + rows, mask=exists, other=0.0)
            factor = c_far * inverse * tl.exp2(tl.minimum(-log_scale, LARGEST))
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
