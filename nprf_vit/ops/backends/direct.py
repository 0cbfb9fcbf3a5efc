"""Dense products (ΦqΦkᵀ ∘ C) V in tiles that stay in cache: O(N²(M+D)) time, O(N(M+D)) memory. docs/math.md, "Direct".

# B batch, K heads, N tokens, M features, E value columns, H×W grid (N = H·W)
# A tile is kc heads × qr rows of queries × kr rows of keys; q = qr·W queries, k = kr·W keys; bc batch items share it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..bias import Bias, whole_table, whole_table_backward
from ..offsets import is_wide, offsets_shape, row_maxima, sum_offsets, toeplitz_view
from ..scratch import Scratch
from . import cells_direct, direct_cross, linear
from .interface import Backend, Case, Gradients, Grid, Inputs, Product, Sums, own_dtype, serves_all

# Zero keys may lie above their row's maximum: bounds of their exponents, and of the gradients of their scores.
_HIGHEST = {torch.float32: 80.0, torch.float64: 600.0}
_LARGEST = {torch.float32: 1e30, torch.float64: 1e290}
# 256 queries × 1024 keys, and as many heads as make a million scores: 4 MB. One head of 4096 keys was half as slow
# again at 96×96, because two threads then share each product. Where heads do not come in fours, more queries instead,
# up to 1024: an odd product of 256 rows keeps one core busy, not two. A grid whose shorter side is above 256 takes
# whole rows. Backward keeps four arrays of that kind.
_QUERIES, _KEYS, _TILE, _FEW = 256, 1024, 1 << 20, 4


def forward(inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype) -> Sums:
    """Numerators Σ_j s_ij v_j (B, K, N, D) and denominators Σ_j s_ij (B, K, N), s_ij = c_{j-i} φq_i·φk_j.

    Both come up to one positive factor per row.
    """
    if inputs.bias is not None and inputs.bias.cells not in (None, grid):
        return cells_direct.forward(inputs, grid)
    if inputs.phi_q.shape[2] != inputs.phi_k.shape[2]:
        return direct_cross.forward(inputs)
    phi_q, phi_k, v, bias, grid, swapped = _tall(*inputs[:3], _table(inputs, grid), grid)
    weights = _Weights.build(bias, grid, causal, phi_k)
    num, den = torch.empty_like(v), v.new_empty(*v.shape[:3], 1)
    scratch = Scratch()
    for t in _tiles(phi_q.shape, v.dtype, grid, causal, _TILE):
        shared, flip = weights.tile(t, share=phi_q.shape[0] > 1)
        for b in t.batches:
            c = weights.of_items(t, b) if shared is None else shared
            queries = _rows(phi_q, b, t.heads, t.q, flip)  # G, q, M
            scores = scratch.buffer('scores', (queries.shape[0], t.q_len, t.k_len), v)  # G, q, k
            torch.bmm(queries, _rows(phi_k, b, t.heads, t.k).transpose(1, 2), out=scores)
            _weigh(scores, c)
            # a ones column in v would give the sums too, but 65 columns cost a quarter more than 64 and a sum
            values, rows = _rows(v, b, t.heads, t.k), [_rows(x, b, t.heads, t.q) for x in (num, den)]
            if not flip and t.k.start == 0:
                torch.bmm(scores, values, out=rows[0])
                torch.sum(scores, -1, keepdim=True, out=rows[1])
                continue
            for total, part in zip(rows, (torch.bmm(scores, values), scores.sum(-1, keepdim=True))):
                part = part.flip(1) if flip else part
                total.add_(part) if t.k.start else total.copy_(part)
    return Sums(_untall(num, grid, swapped), _untall(den, grid, swapped).squeeze(-1))


def backward(
    inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype, grad: torch.Tensor, bias_grad: bool
) -> Gradients:
    """Gradients, given those of numerators and denominators, (B, K, N, D+1); scores are recomputed tile by tile."""
    if inputs.bias is not None and inputs.bias.cells not in (None, grid):
        return cells_direct.backward(inputs, grid, grad, bias_grad)
    if inputs.phi_q.shape[2] != inputs.phi_k.shape[2]:
        return direct_cross.backward(inputs, grad)
    table = _table(inputs, grid)
    d_q, d_k, d_v, d_table = _backward(*inputs[:3], table, grid, causal, grad, bias_grad)
    return Gradients(d_q, d_k, d_v, whole_table_backward(d_table, inputs.bias or Bias(table), grid))


def _backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    grid: Grid,
    causal: bool,
    grad: torch.Tensor,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of phi_q, phi_k, v and the table (K, 2H-1, 2W-1), the last None if not asked for."""
    if v.dtype == torch.float32 and is_wide(_visible(bias, grid, causal)) and not phi_k.ne(0).any(-1).all():
        # zero keys may lie above their row's maximum: what they would count for is beyond float32, not its gradient
        wide = phi_q.double(), phi_k.double(), v.double(), bias.double()
        *grads, d_bias = _backward(*wide, grid, causal, grad.double(), bias_grad)
        d_q, d_k, d_v = (_narrow(x) for x in grads)
        return d_q, d_k, d_v, None if d_bias is None else _narrow(d_bias)
    grad, v_ones = (_tall_tokens(x, grid) for x in (grad, linear.with_ones(v)))
    phi_q, phi_k, v, bias, grid, swapped = _tall(phi_q, phi_k, v, bias, grid)
    g_num = grad[..., :-1].contiguous()
    weights = _Weights.build(bias, grid, causal, phi_k)
    d_q, d_k, d_v = torch.zeros_like(phi_q), torch.zeros_like(phi_k), torch.zeros_like(v)
    d_bias = torch.zeros_like(bias) if bias_grad else None
    scratch = Scratch()
    for t in _tiles(phi_q.shape, v.dtype, grid, causal, _TILE):
        shared, flip = weights.tile(t, share=phi_q.shape[0] > 1)
        d_c: list[torch.Tensor] = []
        for b in t.batches:
            c = weights.of_items(t, b) if shared is None else shared
            queries, keys = _rows(phi_q, b, t.heads, t.q, flip), _rows(phi_k, b, t.heads, t.k)
            scores = scratch.buffer('scores', (queries.shape[0], t.q_len, t.k_len), v)
            d_scores = scratch.buffer('d_scores', scores.shape, v)
            torch.bmm(queries, keys.transpose(1, 2), out=scores)
            _weigh(scores, c)
            _rows(d_v, b, t.heads, t.k).baddbmm_(scores.transpose(1, 2), _rows(g_num, b, t.heads, t.q, flip))
            g, values = _rows(grad, b, t.heads, t.q, flip), _rows(v_ones, b, t.heads, t.k)
            torch.bmm(g, values.transpose(1, 2), out=d_scores)
            if bias_grad:
                _add_batches(d_c, scores.mul_(d_scores), t)
            _weigh(d_scores, c)
            if shared is None:  # infinite where a zero key lies far above the maximum: times its features, NaN
                limit = _LARGEST[d_scores.dtype]
                d_scores.clamp_(-limit, limit)
            part = torch.bmm(d_scores, keys)  # G, q, M
            _rows(d_q, b, t.heads, t.q).add_(part.flip(1) if flip else part)
            _rows(d_k, b, t.heads, t.k).baddbmm_(d_scores.transpose(1, 2), queries)
        if d_bias is not None:
            d_bias[t.heads, t.top : t.top + t.q_rows + t.k_rows - 1] += _sum_diagonals(d_c[0], t, flip, scratch)
    if swapped and d_bias is not None:
        d_bias = d_bias.transpose(1, 2)
    return _untall(d_q, grid, swapped), _untall(d_k, grid, swapped), _untall(d_v, grid, swapped), d_bias


@dataclass(frozen=True)
class _Tile:
    heads: slice
    q: slice  # tokens
    k: slice
    width: int
    top: int  # first row of the offset table that the tile touches
    batches: tuple[slice, ...]

    @property
    def q_len(self) -> int:
        return self.q.stop - self.q.start

    @property
    def k_len(self) -> int:
        return self.k.stop - self.k.start

    @property
    def q_rows(self) -> int:
        return self.q_len // self.width

    @property
    def k_rows(self) -> int:
        return self.k_len // self.width


def _tiles(shape: tuple[int, ...], dtype: torch.dtype, grid: Grid, causal: bool, budget: int) -> Iterator[_Tile]:
    batch, heads, n, _ = shape
    height, width = grid
    budget = budget * 4 // dtype.itemsize
    q_rows, k_rows = max(1, _QUERIES // width), max(1, _KEYS // width)
    q_rows, k_rows = min(q_rows, height), min(k_rows, height)
    group = max(1, budget // (q_rows * k_rows * width * width))
    if group > _FEW:
        h_step, b_step = math.ceil(heads / math.ceil(heads / group)), max(1, group // heads)
    else:
        h_step = math.gcd(heads, group)
        b_step = math.gcd(batch, group // h_step) if h_step == heads else 1
        more = group // (h_step * b_step)
        # causal: half of what a block on the diagonal computes is thrown away
        q_rows = min(q_rows * (min(more, 2) if causal else more), height)
    batches = tuple(slice(b, min(b + b_step, batch)) for b in range(0, batch, b_step))
    for h in range(0, heads, h_step):
        for y in range(0, height, q_rows):
            y_end = min(y + q_rows, height)
            k_limit = y_end if causal else height  # causal: width is 1 and later keys are never touched
            for k in range(0, k_limit, k_rows):
                k_end = min(k + k_rows, k_limit)
                yield _Tile(
                    slice(h, min(h + h_step, heads)),
                    slice(y * width, y_end * width),
                    slice(k * width, k_end * width),
                    width,
                    k + height - y_end,
                    batches,
                )


@dataclass
class _Weights:
    """c = exp(bias - max), read tile by tile through a strided view of its offset table; C itself is never stored."""

    table: torch.Tensor  # K, 2H-1, 2W-1: c, or the bias itself where rows need a maximum of their own
    row_max: torch.Tensor | None  # K, H, W in reversed order of queries, for a wide bias
    grid: tuple[int, int]
    item_max: torch.Tensor | None = None  # B, K, N: row maxima over keys that are not zero, where some are

    @staticmethod
    def build(bias: torch.Tensor, grid: Grid, causal: bool, phi_k: torch.Tensor) -> '_Weights':
        if causal:  # offsets δ > 0 are key after query
            bias = bias.clone()
            bias[:, grid[0] :] = -torch.inf
        top = bias.amax((1, 2), keepdim=True)
        if not is_wide(_visible(bias, grid, causal)):
            return _Weights((bias - top).exp_(), None, grid)
        weights = _Weights(bias, row_maxima(bias, grid), grid)
        seen = phi_k.ne(0).any(-1)  # B, K, N
        if not seen.all():
            weights.item_max = weights.largest_seen(seen, causal)
        return weights

    def tile(self, t: _Tile, share: bool) -> tuple[torch.Tensor | None, bool]:
        """Weights (kc, q, k) or (kc, qr, W, kr, W) of a tile, and whether its queries run backwards.

        When several batch items share a tile it is copied, and its queries put in order on the way. None in place of
        weights: they differ from one batch item to the next, see `of_items`.
        """
        if self.item_max is not None:
            return None, False
        view = self.view(t)
        if self.row_max is not None:
            first = self.grid[0] - t.q.stop // t.width
            row_max = self.row_max[t.heads, first : first + t.q_rows]  # kc, qr, W
            view = (view - row_max[..., None, None]).exp_()
        elif not share:
            return view, True
        return self.in_order(view, t), False

    def of_items(self, t: _Tile, b: slice) -> torch.Tensor:
        """Weights (G, q, k) of a tile for the batch items b, each by its own row maxima."""
        assert self.item_max is not None  # `tile` says so
        x = self.in_order(self.view(t), t) - self.item_max[b, t.heads, t.q, None]  # bc, kc, q, k
        # A zero key may lie above the maximum. It counts in its own gradient alone, which must stay finite.
        return x.clamp_(max=_HIGHEST[x.dtype]).exp_().flatten(0, 1)

    def view(self, t: _Tile) -> torch.Tensor:
        return toeplitz_view(self.table[t.heads], (t.q_rows, t.width), (t.k_rows, t.width), t.top)

    def in_order(self, view: torch.Tensor, t: _Tile) -> torch.Tensor:
        order = torch.arange(t.q_len - 1, -1, -1, device=view.device)
        return view.reshape(view.shape[0], t.q_len, t.k_len).index_select(1, order)

    def largest_seen(self, seen: torch.Tensor, causal: bool) -> torch.Tensor:
        """Row maxima of the bias over keys that are not zero, (B, K, N). One more pass over all pairs."""
        largest = self.table.new_full(seen.shape, torch.finfo(self.table.dtype).min)
        for t in _tiles((*seen.shape, 1), self.table.dtype, self.grid, causal, _TILE):
            table = self.in_order(self.view(t), t)  # kc, q, k
            for b in range(seen.shape[0]):
                part = table.masked_fill(~seen[b, t.heads, None, t.k], -torch.inf).amax(-1)  # kc, q
                rows = largest[b, t.heads, t.q]
                torch.maximum(rows, part, out=rows)
        return largest


def _visible(bias: torch.Tensor, grid: Grid, causal: bool) -> torch.Tensor:
    """The offsets (K, ·, ·) that any row can see; a causal sequence may lie along either axis."""
    return bias.flatten(1)[:, : max(grid), None] if causal else bias


def _narrow(x: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.float32).max
    return x.clamp(-largest, largest).float()


def _table(inputs: Inputs, grid: Grid) -> torch.Tensor:
    """The bias of every offset, (K, 2H-1, 2W-1), zeros where there is none."""
    if inputs.bias is not None:
        return whole_table(inputs.bias, grid)
    return inputs.phi_q.new_zeros(inputs.phi_q.shape[1], 2 * grid[0] - 1, 2 * grid[1] - 1)


def _add_batches(total: list[torch.Tensor], x: torch.Tensor, t: _Tile) -> None:
    """Adds x (G, q, k) over batch items to total[0] (kc, q, k), an empty list at first; x's memory may be reused."""
    x = x.view(-1, t.heads.stop - t.heads.start, *x.shape[1:])  # bc, kc, q, k
    x = x[0] if x.shape[0] == 1 else x.sum(0)
    if total:
        total[0].add_(x)
    else:
        total.append(x if len(t.batches) == 1 else x.clone())


def _weigh(scores: torch.Tensor, c: torch.Tensor) -> None:
    if c.dim() == 5:
        scores.view(c.shape).mul_(c)
    else:
        scores.view(-1, *c.shape).mul_(c)


def _sum_diagonals(d_c: torch.Tensor, t: _Tile, flip: bool, scratch: Scratch) -> torch.Tensor:
    """Sums (kc, q, k) over equal offsets to (kc, qr+kr-1, 2W-1)."""
    d_c = d_c.view(-1, t.q_rows, t.width, t.k_rows, t.width)
    return sum_offsets(d_c, scratch.buffer('shear', offsets_shape(d_c.shape), d_c, zero=True), flip)


def _rows(x: torch.Tensor, b: slice, heads: slice, rows: slice, flip: bool = False) -> torch.Tensor:
    """(B, K, N, ·) -> (G, rows, ·), a view unless reversed; G = bc·kc, where bc > 1 only with all heads."""
    x = x[b, heads, rows]
    x = x.flatten(0, 1) if x.shape[0] > 1 else x[0]
    return x.flip(1) if flip else x


def _tall(
    phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Grid, bool]:
    """Puts the longer side of the grid along y, so that one row of queries by one row of keys is at most N scores."""
    height, width = grid
    swapped = width > height
    phi_q, phi_k, v = (_tall_tokens(x, grid) for x in (phi_q, phi_k, v))
    if not swapped:
        return phi_q, phi_k, v, bias.contiguous(), grid, False
    return phi_q, phi_k, v, bias.transpose(1, 2).contiguous(), (width, height), True


def _tall_tokens(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    height, width = grid
    return _transpose_tokens(x, height, width) if 1 < height < width else x.contiguous()


def _untall(x: torch.Tensor, grid: Grid, swapped: bool) -> torch.Tensor:
    return _transpose_tokens(x, *grid) if swapped and grid[1] > 1 else x


def _transpose_tokens(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    return x.unflatten(2, (height, width)).transpose(2, 3).flatten(2, 3).contiguous()


def _cost(case: Case) -> float | None:
    if not case.has_bias:
        return None  # `linear` gives the same in a time that grows with N
    if case.cells not in (None, case.grid) and case.device != 'cpu':
        return None  # `cells` has fewer launches
    return case.n**2 * (case.m + case.d + 1) * (0.5 if case.causal else 1.0)


def log_scale(inputs: Inputs, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """(K, 1), or for a wide bias (1, K, N) or (B, K, N): the maxima that `_Weights` takes out."""
    if inputs.bias is not None and inputs.bias.cells not in (None, grid):
        return cells_direct.log_scale(inputs, grid)
    table = _table(inputs, grid)
    phi_k, upright = _tall_tokens(inputs.phi_k, grid), (max(grid), min(grid))
    swapped = grid[1] > grid[0]
    weights = _Weights.build((table.transpose(1, 2) if swapped else table).contiguous(), upright, False, phi_k)
    if weights.item_max is not None:
        largest = weights.item_max
    elif weights.row_max is not None:
        largest = weights.row_max.flip(1, 2).flatten(1)[None]  # 1, K, N
    else:
        return table.amax((1, 2))[:, None]
    return _untall(largest.unsqueeze(-1), upright, swapped).squeeze(-1)


PRODUCT = Product(forward, backward, own_dtype, log_scale=log_scale)
BACKEND = Backend('direct', serves_all, _cost, PRODUCT)
