"""What the kernels share: which tokens a tile holds, and the bias between two tiles.

# K heads, N tokens on an H×W grid (a sequence is 1×N), a table of offsets up to ±RY, ±RX: TW = 2·RX+1 columns
# A full table has RY = H-1 and RX = W-1. Codes: token (y, x) has code y·TW + x, so that the entry of a query and a key
# is code(key) - code(query) + centre: one subtraction per pair.
"""

import os

import triton
import triton.language as tl

# the interpreter multiplies the bits of bfloat16 as integers: there the same numbers go through float32
_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get('TRITON_INTERPRET') == '1')


@triton.jit
def flat_tile(index, n, BLOCK: tl.constexpr):
    """Tokens of tile `index` in reading order, and whether each exists."""
    tokens = index * BLOCK + tl.arange(0, BLOCK)
    return tokens, tokens < n


@triton.jit
def grid_tile(top, left, height, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Tokens of the ROWS×COLS tile whose first is (top, left), and whether each lies on the grid."""
    i = tl.arange(0, ROWS * COLS)
    y, x = top + i // COLS, left + i % COLS
    return y * width + x, (y >= 0) & (y < height) & (x >= 0) & (x < width)


@triton.jit
def token_offsets(tokens, stride, LONG: tl.constexpr):
    """tokens·stride, in 64 bits where the product may pass 2³¹."""
    if LONG:
        return tokens.to(tl.int64) * stride
    return tokens * stride


@triton.jit
def load_rows(base, tokens, exists, stride, first, size, BLOCK: tl.constexpr, LONG: tl.constexpr):
    """(tokens, BLOCK) numbers from column `first` on; zeros where a token or a column does not exist."""
    cols = first + tl.arange(0, BLOCK)
    rows = token_offsets(tokens, stride, LONG)
    return tl.load(base + rows[:, None] + cols[None, :], mask=exists[:, None] & (cols < size)[None, :], other=0.0)


@triton.jit
def store_rows(base, tokens, exists, stride, first, size, x, BLOCK: tl.constexpr, LONG: tl.constexpr):
    cols = first + tl.arange(0, BLOCK)
    rows = token_offsets(tokens, stride, LONG)
    mask = exists[:, None] & (cols < size)[None, :]
    tl.store(base + rows[:, None] + cols[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def half_dot(a, b, acc):
    """acc + a·b of half-precision tiles, summed in float32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision='ieee')
    return tl.dot(a, b, acc)


@triton.jit
def visible(q_tokens, q_exists, k_tokens, k_exists, CAUSAL: tl.constexpr, QUERIES_FIRST: tl.constexpr):
    """Which pairs attend, (queries, keys) or (keys, queries)."""
    if QUERIES_FIRST:
        seen = q_exists[:, None] & k_exists[None, :]
        if CAUSAL:
            seen &= k_tokens[None, :] <= q_tokens[:, None]
    else:
        seen = k_exists[:, None] & q_exists[None, :]
        if CAUSAL:
            seen &= k_tokens[:, None] <= q_tokens[None, :]
    return seen


@triton.jit
def lookup(
    table,
    beyond,
    q_tokens,
    k_tokens,
    seen,
    width,
    radius_y,
    radius_x,
    FULL: tl.constexpr,
    QUERIES_FIRST: tl.constexpr,
):
    """Table entries of the pairs that are seen; `beyond` where a window does not reach, zero where unseen."""
    table_width = 2 * radius_x + 1
    q_y, q_x = q_tokens // width, q_tokens % width
    k_y, k_x = k_tokens // width, k_tokens % width
    q_code = q_y * table_width + q_x
    k_code = k_y * table_width + k_x + radius_y * table_width + radius_x
    if QUERIES_FIRST:
        entry = k_code[None, :] - q_code[:, None]
    else:
        entry = k_code[:, None] - q_code[None, :]
    if FULL:
        return tl.load(table + entry, mask=seen, other=0.0)
    if QUERIES_FIRST:
        dy, dx = k_y[None, :] - q_y[:, None], k_x[None, :] - q_x[:, None]
    else:
        dy, dx = k_y[:, None] - q_y[None, :], k_x[:, None] - q_x[None, :]
    inside = (dy <= radius_y) & (dy >= -radius_y) & (dx <= radius_x) & (dx >= -radius_x)
    return tl.load(table + entry, mask=seen & inside, other=beyond)
