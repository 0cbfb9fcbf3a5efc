"""Features of normalized queries and keys, φ(x̂) = exp(w·x̂ - ‖x̂‖²/2) up to a factor, and their gradient.

# B batch, K heads, N tokens, D head dim, M features
# q, k (B, K, N, D) by strides, straight from the packed projection; w (K, M, D); phi_q, phi_k (B, K, N, M) float32
# One launch each. Program p: tile of tokens, then queries or keys, then (batch, head).

A query is divided by its own largest feature. A key is divided by exp(max‖w‖), a constant: |w·x̂| ≤ ‖w‖, so no maximum
over keys is needed, causal or not. Both cancel. Plain PyTorch: ops/features.py.
"""

import triton
import triton.language as tl

from .tiles import load_rows, store_rows

_SHORTEST: tl.constexpr = tl.constexpr(1e-6)  # shorter vectors are not stretched to length one
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _normalized(base, tokens, exists, stride, d, BLOCK_D: tl.constexpr, LONG: tl.constexpr):
    """x̂ (tokens, D) in float32, and what x was multiplied by; scaled first, so that squares of large x are finite."""
    x = load_rows(base, tokens, exists, stride, 0, d, BLOCK_D, LONG).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    scale = 1.0 / tl.maximum(largest, _SHORTEST)
    scaled = x * scale[:, None]
    norm = tl.sqrt(tl.sum(scaled * scaled, 1))  # ‖x‖·scale
    inverse = 1.0 / tl.maximum(norm, _SHORTEST * scale)
    return scaled * inverse[:, None], inverse * scale, norm >= _SHORTEST * scale


@triton.jit
def feature_map(
    q,
    k,
    w,
    phi_q,
    phi_k,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    num_heads,
    n,
    m,
    d,
    tiles,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):
    pid = tl.program_id(0)
    tile, is_key, item = pid % tiles, pid // tiles % 2, pid // (2 * tiles)
    b, h = (item // num_heads).to(tl.int64), (item % num_heads).to(tl.int64)
    tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = tokens < n
    out_offset = item.to(tl.int64) * n * m
    if is_key == 0:
        unit, _, _ = _normalized(q + b * q_stride_b + h * q_stride_h, tokens, exists, q_stride_n, d, BLOCK_D, LONG)
        out = phi_q + out_offset
    else:
        unit, _, _ = _normalized(k + b * k_stride_b + h * k_stride_h, tokens, exists, k_stride_n, d, BLOCK_D, LONG)
        out = phi_k + out_offset
    half_square = 0.5 * tl.sum(unit * unit, 1)
    top = tl.full([BLOCK_N], float('-inf'), tl.float32)
    for chunk in range(CHUNKS):
        features = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
        weights = load_rows(w + h * m * d, features, features < m, d, 0, d, BLOCK_D, LONG)  # BLOCK_M, D
        if is_key == 0:
            exponent = tl.dot(unit, tl.trans(weights), input_precision=PRECISION)
            exponent = tl.where((features < m)[None, :], exponent, float('-inf'))
            top = tl.maximum(top, tl.max(exponent, 1))
        else:
            top = tl.maximum(top, tl.sqrt(tl.max(tl.sum(weights * weights, 1), 0)))
    if is_key == 1:
        top += half_square
    for chunk in range(CHUNKS):
        features = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
        weights = load_rows(w + h * m * d, features, features < m, d, 0, d, BLOCK_D, LONG)
        exponent = tl.dot(unit, tl.trans(weights), input_precision=PRECISION)
        phi = tl.exp2((exponent - top[:, None]) * _LOG2_E)
        store_rows(out, tokens, exists, m, chunk * BLOCK_M, m, phi, BLOCK_M, LONG)


@triton.jit
def feature_map_gradient(
    q,
    k,
    w,
    phi_q,
    phi_k,
    d_phi_q,
    d_phi_k,
    d_q,
    d_k,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    dq_stride_b,
    dq_stride_h,
    dq_stride_n,
    dk_stride_b,
    dk_stride_h,
    dk_stride_n,
    num_heads,
    n,
    m,
    d,
    tiles,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):
    """dx from dφ: with e = φ∘dφ, dx̂ = eᵀw - (Σe) x̂, and dx is dx̂ without its part along x̂, over ‖x‖."""
    pid = tl.program_id(0)
    tile, is_key, item = pid % tiles, pid // tiles % 2, pid // (2 * tiles)
    b, h = (item // num_heads).to(tl.int64), (item % num_heads).to(tl.int64)
    tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = tokens < n
    offset = item.to(tl.int64) * n * m
    if is_key == 0:
        unit, inverse, long = _normalized(
            q + b * q_stride_b + h * q_stride_h, tokens, exists, q_stride_n, d, BLOCK_D, LONG
        )
        phi, d_phi = phi_q + offset, d_phi_q + offset
    else:
        unit, inverse, long = _normalized(
            k + b * k_stride_b + h * k_stride_h, tokens, exists, k_stride_n, d, BLOCK_D, LONG
        )
        phi, d_phi = phi_k + offset, d_phi_k + offset
    d_unit = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    for chunk in range(CHUNKS):
        features = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
        weights = load_rows(w + h * m * d, features, features < m, d, 0, d, BLOCK_D, LONG)
        e = load_rows(phi, tokens, exists, m, chunk * BLOCK_M, m, BLOCK_M, LONG)
        e = e * load_rows(d_phi, tokens, exists, m, chunk * BLOCK_M, m, BLOCK_M, LONG)
        d_unit = tl.dot(e, weights, d_unit, input_precision=PRECISION)
        total += tl.sum(e, 1)
    if is_key == 1:
        d_unit -= total[:, None] * unit
    along = tl.sum(d_unit * unit, 1)
    d_x = (d_unit - tl.where(long, along, 0.0)[:, None] * unit) * inverse[:, None]
    if is_key == 0:
        store_rows(d_q + b * dq_stride_b + h * dq_stride_h, tokens, exists, dq_stride_n, 0, d, d_x, BLOCK_D, LONG)
    else:
        store_rows(d_k + b * dk_stride_b + h * dk_stride_h, tokens, exists, dk_stride_n, 0, d, d_x, BLOCK_D, LONG)
