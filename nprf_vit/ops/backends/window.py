"""Products for a bias that is constant beyond a window: dense inside, one linear term outside. docs/math.md, "Window".

    Σ_j c_{j-i} s_ij v_j = Σ_{j in the window of i} (c_{j-i} - c_far) s_ij v_j + c_far Σ_j s_ij v_j

O(N·(2R+1)(2S+1)(M+D)) time and O(N(M+D)) memory.

# B batch, K heads, N tokens, M features, D head dim, H×W grid, window of offsets up to ±R, ±S
# Queries come in blocks of r rows × s columns; blocks in one strip of s columns share their keys' memory.
# A block sees (2R+r) rows × (2S+s) columns of keys; beyond the grid these are zero features.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nprf_vit.ops.offsets import offsets_shape, sum_offsets, toeplitz_view

from . import linear

# 8×8 queries per block: 1156 keys for a radius of 13, against 729 in the window itself, and products large enough to
# be fast; a sequence takes 64 queries at a time.
_BLOCK, _SEQUENCE_BLOCK = (8, 8), (64, 1)
_SCORES = 1 << 20  # scores alive at once, per array
# The linear term brings c_far for keys inside the window and the dense part takes it away again. What is left rounds by
# this many units in the last place of c_far, measured below 26 up to 1024 keys (tests/ops/test_window.py), and by an
# eighth per key of larger windows: there equal features gave 350 units for 2000 keys.
_ROUNDING, _FEW_KEYS = 32.0, 1024
# One maximum serves all rows of a head. A row that sees nothing near it sums weights of e^-20, float32 results in
# float64 sums of e^-300.
_DEPTH, _WIDER_DEPTH = 20.0, 300.0
_TOLERANCE = {torch.float32: 4e-4, torch.float64: 4e-9}


def forward(phi_q, phi_k, v, bias, far, grid, causal):
    """Numerators and denominators as in `direct.forward`, for a bias window (K, 2R+1, 2S+1) and far (K,)."""
    plan = _Plan.build(bias, far, grid, causal, working_dtype(bias, far, grid, causal, v.dtype))
    weights = plan.tile(plan.inside - plan.far[:, None, None])  # K, q, k
    num, den = torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(v.shape[:-1])
    # one head at a time from end to end: arrays over all heads are beyond what the allocator keeps for the next one
    for b, h in _heads(v):
        q, k, value = (x[b, h].to(weights.dtype) for x in (phi_q, phi_k, v))  # N, ·
        total = _linear(q, k, value, causal).mul_(plan.far[h])  # N, D+1
        queries, keys, values = plan.pad(q, True), plan.pad(k), plan.pad(value)
        out = queries.new_empty(*queries.shape[:2], total.shape[-1])
        for strip in plan.strips():
            _strip_forward(strip, queries, keys, values, out, weights[h])
        total.add_(plan.unpad(out, True))
        num[b, h], den[b, h] = total[:, :-1], total[:, -1]
    return num, den


def _strip_forward(strip, queries, keys, values, out, w):
    q, k, value = strip.queries(queries), strip.keys(keys), strip.keys(values)
    parts = []
    for b in strip.chunks(w.numel()):
        scores = torch.bmm(q[b], k[b].transpose(1, 2)).mul_(w)  # blocks, q, k
        parts.append(torch.cat([torch.bmm(scores, value[b]), scores.sum(-1, keepdim=True)], dim=-1))
    strip.queries(out, torch.cat(parts))


def backward(phi_q, phi_k, v, bias, far, grid, causal, grad, bias_grad):
    """Gradients of phi_q, phi_k, v, bias and far (or None), given grad (B, K, N, D+1) as in `direct.backward`."""
    plan = _Plan.build(bias, far, grid, causal, working_dtype(bias, far, grid, causal, v.dtype))
    weights = plan.tile(plan.inside - plan.far[:, None, None])
    d_weights, total = torch.zeros_like(weights), torch.zeros_like(plan.far)  # total: c_far Σ_ij dA_ij s_ij
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (phi_q, phi_k, v))
    for b, h in _heads(v):
        q, k, value, g = (x[b, h].to(weights.dtype) for x in (phi_q, phi_k, v, grad))  # N, ·
        ones = linear.with_ones(value)  # N, D+1
        scaled = g * plan.far[h]
        if bias_grad:
            total[h] += (scaled * _linear(q, k, value, causal)).sum()
        grads = linear.product_backward(*(x[None, None] for x in (q, k, ones, scaled)), causal)
        inputs = [plan.pad(x, own) for x, own in ((q, True), (g, True), (k, False), (ones, False))]
        outputs = [torch.zeros_like(inputs[i]) for i in (0, 2, 3)]
        for strip in plan.strips():
            _strip_backward(strip, inputs, outputs, weights[h], d_weights[h])
        of_q, of_k, of_ones = (
            far_part[0, 0] + plan.unpad(out, own) for far_part, out, own in zip(grads, outputs, (True, False, False))
        )
        d_q[b, h], d_k[b, h], d_v[b, h] = of_q, of_k, of_ones[:, :-1]
    d_bias = d_far = None
    if bias_grad:
        d_bias, d_far = (x.to(v.dtype) for x in plan.offset_gradients(d_weights, total, bias))
    return d_q, d_k, d_v, d_bias, d_far


def _heads(v):
    return itertools.product(range(v.shape[0]), range(v.shape[1]))


def _linear(q, k, value, causal):
    """Σ_j s_ij [v_j, 1] of one head: (N, D+1)."""
    return linear.product(*(x[None, None] for x in (q, k, linear.with_ones(value))), causal)[0, 0]


def _strip_backward(strip, inputs, outputs, w, d_w):
    queries, grad, keys, ones = inputs
    q, g, k, value = strip.queries(queries), strip.queries(grad), strip.keys(keys), strip.keys(ones)
    d_q = torch.empty_like(q)
    for b in strip.chunks(w.numel()):
        scores = torch.bmm(q[b], k[b].transpose(1, 2))  # blocks, q, k
        d_scores = torch.bmm(g[b], value[b].transpose(1, 2))
        d_w += (scores * d_scores).sum(0)
        scores.mul_(w)
        d_scores.mul_(w)
        torch.bmm(d_scores, k[b], out=d_q[b])
        strip.add_keys(outputs[1], torch.bmm(d_scores.transpose(1, 2), q[b]), b)
        strip.add_keys(outputs[2], torch.bmm(scores.transpose(1, 2), g[b]), b)
    strip.queries(outputs[0], d_q)


def working_dtype(bias, far, grid, causal, dtype, phi_k=None) -> torch.dtype | None:
    """The narrowest dtype in which neither c_far drowns the window nor one maximum per head drowns a row.

    None if there is none, or if the window holds all offsets: then the full table must be used. With `phi_k` keys
    without any features are looked for: rows need not see even their own key then.
    """
    inside = _crop(bias, grid)
    if all(s == 2 * n - 1 for s, n in zip(inside.shape[1:], grid)):
        return None
    zero = inside[:, inside.shape[1] // 2, inside.shape[2] // 2].double()  # K
    if causal:
        inside = inside[..., : inside.shape[-1] // 2 + 1]
    keys = inside[0].numel()
    rounding = _ROUNDING if keys <= _FEW_KEYS else keys / 8
    inside, far = inside.flatten(1).double(), far.double()
    excess = (far - inside.amin(1)).amax().clamp(min=0).item()
    top = torch.maximum(inside.amax(1), far)  # K
    depth = (top - zero).amax().item()  # every row sees its own key
    deep = max(depth, _spread(inside, far, top)) > _DEPTH
    if deep and phi_k is not None and not phi_k.ne(0).any(-1).all():
        return None
    for working in (torch.float32, torch.float64):
        unit = torch.finfo(working).eps / 2
        reach = _DEPTH if working == dtype else _WIDER_DEPTH
        fits = excess <= math.log(_TOLERANCE[dtype] / (rounding * unit)) and depth <= reach
        if working.itemsize >= dtype.itemsize and fits:
            return working
    return None


def _spread(inside, far, top):
    """How far below the maximum a finite weight of a head lies; minus infinity is no weight."""
    low = torch.cat([inside, far[:, None]], dim=1)
    return (top - low.masked_fill(low == -torch.inf, torch.inf).amin(1)).amax().item()


def cost(radius: tuple[int, int], m: int, d: int) -> int:
    """Multiply-adds per token, for the cost model."""
    r, s = _SEQUENCE_BLOCK if radius[0] == 0 else _BLOCK
    keys = (2 * radius[1] + r) if radius[0] == 0 else (2 * radius[0] + r) * (2 * radius[1] + s)
    return keys * (m + d + 1) + 2 * m * (d + 1)


@dataclass
class _Plan:
    """The window on its grid, sequences standing upright as N×1 grids."""

    inside: torch.Tensor  # K, 2R+1, 2S+1: c of the offsets that occur
    far: torch.Tensor  # K
    grid: tuple[int, int]
    block: tuple[int, int]
    causal: bool
    upright: bool

    @staticmethod
    def build(bias, far, grid, causal, dtype):
        bias, far = _crop(bias, grid).to(dtype), far.to(dtype)
        upright = grid[0] == 1
        if upright:
            bias, grid = bias.transpose(1, 2), (grid[1], 1)
        if causal:  # later keys have no weight, and the far constant is not theirs to lose
            bias = bias.clone()
            bias[:, bias.shape[1] // 2 + 1 :] = -torch.inf
        top = torch.maximum(bias.amax((1, 2)), far)
        inside, far = (bias - top[:, None, None]).exp(), (far - top).exp()
        return _Plan(inside, far, grid, _SEQUENCE_BLOCK if upright else _BLOCK, causal, upright)

    @property
    def radius(self):
        return self.inside.shape[1] // 2, self.inside.shape[2] // 2

    @property
    def key_block(self):
        """Rows and columns of keys that a block sees; causal blocks look back only."""
        rows = self.radius[0] * (1 if self.causal else 2) + self.block[0]
        return rows, 2 * self.radius[1] + self.block[1]

    @property
    def padding(self):
        """Rows and columns missing to whole blocks."""
        return -self.grid[0] % self.block[0], -self.grid[1] % self.block[1]

    def pad(self, x, own=False):
        """Tokens (N, ·) of one head as a padded grid (rows, cols, ·): whole blocks, and for keys a margin of radius."""
        x = x.unflatten(0, self.grid)
        rows, cols = self.padding
        if own:
            return F.pad(x, (0, 0, 0, cols, 0, rows))
        r, s = self.radius
        return F.pad(x, (0, 0, s, s + cols, r, rows + (0 if self.causal else r)))

    def unpad(self, x, own=False):
        """(rows, cols, ·) -> (N, ·), the tokens of the grid."""
        r, s = (0, 0) if own else self.radius
        return x[r : r + self.grid[0], s : s + self.grid[1]].flatten(0, 1)

    def tile(self, table):
        """Weights (K, q, k) of a block, the same for every block: zero for keys outside a query's window."""
        (r, s), (rows, cols) = self.block, self.key_block
        table = table if not self.causal else _without_future(table)
        padded = F.pad(table, (s - 1, s - 1, r - 1, r - 1)).contiguous()
        view = toeplitz_view(padded, self.block, (rows, cols))
        return view.flip(1, 2).reshape(table.shape[0], r * s, rows * cols)

    def offset_gradients(self, d_weights, total, bias):
        """Gradients of the bias window and of far, from Σ dA·s per weight of the tile and c_far·Σ dA·s over all."""
        (r, s), (rows, cols) = self.block, self.key_block
        x = d_weights.view(-1, r, s, rows, cols)
        by_offset = sum_offsets(x, x.new_zeros(offsets_shape(x.shape)), reversed_queries=False)
        y, z = 2 * self.radius[0] + 1, 2 * self.radius[1] + 1
        by_offset = F.pad(by_offset, (0, 0, 0, max(0, y + r - 1 - by_offset.shape[1])))
        by_offset = by_offset[:, r - 1 : r - 1 + y, s - 1 : s - 1 + z]  # K, 2R+1, 2S+1
        if self.causal:
            by_offset = _without_future(by_offset)
        d_bias = self.inside * by_offset
        # A constant added to every offset changes nothing, so all gradients add up to zero: where the far constant
        # carries most of the weight its own sum cancels to a rest, and minus the window's is the better number.
        dominates = self.far * (self.grid[0] * self.grid[1]) > self.inside.sum((1, 2))  # K
        d_far = torch.where(dominates, -d_bias.sum((1, 2)), total - self.far * by_offset.sum((1, 2)))
        if self.upright:
            d_bias = d_bias.transpose(1, 2)
        y, z = ((a - b) // 2 for a, b in zip(bias.shape[1:], d_bias.shape[1:]))
        return F.pad(d_bias, (z, z, y, y)), d_far

    def strips(self):
        for x in range(0, self.grid[1], self.block[1]):
            yield _Strip(self, x)


@dataclass
class _Strip:
    plan: _Plan
    left: int

    def queries(self, x, new=None):
        """The strip's queries (blocks, q, ·) of a padded grid; or writes new ones."""
        view = x[:, self.left : self.left + self.plan.block[1]]  # rows, s, ·
        if new is not None:
            view.copy_(new.view(view.shape))
        return view.reshape(-1, self.plan.block[0] * self.plan.block[1], x.shape[-1])

    def keys(self, x):
        """What each block sees (blocks, k, ·): overlapping views of the strip's columns."""
        rows, cols = self.plan.key_block
        strip = x[:, self.left : self.left + cols].contiguous()  # rows, cols, ·
        return self._overlapping(strip, slice(0, self.blocks), 1)

    def add_keys(self, total, part, b):
        """Adds part (blocks b, k, ·) to a padded grid: blocks that do not overlap together, the rest in turn."""
        rows, cols = self.plan.key_block
        r = self.plan.block[0]
        first, last = b.start * r, (b.stop - 1) * r + rows
        strip = total.new_zeros(last - first, cols, total.shape[-1])
        apart = -(-rows // r)
        for i in range(min(apart, part.shape[0])):
            chosen = part[i::apart]
            self._overlapping(strip[i * r :], slice(0, chosen.shape[0]), apart).add_(chosen)
        total[first:last, self.left : self.left + cols].add_(strip)

    def chunks(self, scores):
        step = max(1, _SCORES // scores)
        return [slice(b, min(b + step, self.blocks)) for b in range(0, self.blocks, step)]

    @property
    def blocks(self):
        return -(-self.plan.grid[0] // self.plan.block[0])

    def _overlapping(self, strip, b, apart):
        rows, cols = self.plan.key_block
        channels = strip.shape[-1]
        shape = (b.stop - b.start, rows * cols, channels)
        strides = (apart * self.plan.block[0] * cols * channels, channels, 1)
        return strip.as_strided(shape, strides, strip.storage_offset())


def _crop(bias, grid):
    """The part of a window that occurs on the grid."""
    y, x = (max(0, s // 2 - (n - 1)) for s, n in zip(bias.shape[1:], grid))
    return bias[:, y : bias.shape[1] - y, x : bias.shape[2] - x]


def _without_future(table):
    table = table.clone()
    table[:, table.shape[1] // 2 + 1 :] = 0
    return table
