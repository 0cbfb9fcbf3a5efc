"""`direct` for a bias between cells: dense products (ΦqΦkᵀ ∘ C) V, C gathered tile by tile. docs/math.md, "Cells".

O(N²(M+D)) time. Below about a thousand tokens at 14×14 cells it is cheaper than `cells`, whose products between cells
do not shrink with N; and it is the other algorithm to hold `cells` against.

# B batch, K heads, N tokens, M features, D head dim, H×W grid, h×w cells (g = h·w)
# A tile is kc heads × q queries of some rows of cells × k keys; every batch item uses it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..bias import BiasGradients
from ..cell_grid import CellGrid, cell_of, first_token, upright
from ..cell_weights import DenseWeights, cell_maxima, seen_cells, sum_offsets
from .interface import Gradients, Grid, Inputs, Sums, narrow, widen

_QUERIES, _KEYS, _TILE = 256, 1024, 1 << 20  # as in `direct`; off the CPU as many scores as 512 MB hold
_DEVICE_TILE = 1 << 27
_LARGEST = {torch.float32: 1e30, torch.float64: 1e290}


class _Tile(NamedTuple):
    items: slice
    heads: slice
    rows: slice  # of query cells
    q: slice  # tokens
    k: slice
    q_cells: torch.Tensor  # (q,) the cells of the queries, counted from the first of the rows
    k_cells: torch.Tensor  # (k,)
    weights: torch.Tensor  # kc, q, k


def forward(inputs: Inputs, grid: Grid) -> Sums:
    """The sums for a bias (K, 2h-1, 2w-1) between cells (h, w)."""
    phi_q, phi_k, v, bias = inputs
    table, places = upright(bias, grid, v.device)
    num, den = v.new_zeros(v.shape), v.new_zeros(v.shape[:-1])
    for t in _tiles(phi_k, table, places, seen_cells(phi_k, table, places)):
        scores = phi_q[t.items, t.heads, t.q] @ phi_k[t.items, t.heads, t.k].transpose(-1, -2)  # bc, kc, q, k
        scores.mul_(t.weights)
        num[t.items, t.heads, t.q] += scores @ v[t.items, t.heads, t.k]
        den[t.items, t.heads, t.q] += scores.sum(-1)
    return Sums(num, den)


def backward(inputs: Inputs, grid: Grid, grad: torch.Tensor, bias_grad: bool) -> Gradients:
    """Gradients, given those of numerators and denominators, (B, K, N, D+1); scores are recomputed tile by tile."""
    phi_q, phi_k, v, bias = inputs
    table, places = upright(bias, grid, v.device)
    seen = seen_cells(phi_k, table, places)
    if seen is not None and v.dtype == torch.float32:
        return narrow(backward(widen(inputs), grid, grad.double(), bias_grad))
    d_q, d_k, d_v = (x.new_zeros(x.shape) for x in (phi_q, phi_k, v))
    d_table, (h, _) = torch.zeros_like(table), places.cells
    for t in _tiles(phi_k, table, places, seen):
        at_q, at_k = (t.items, t.heads, t.q), (t.items, t.heads, t.k)
        queries, keys, g = phi_q[at_q], phi_k[at_k], grad[at_q]
        scores = (queries @ keys.transpose(-1, -2)).mul_(t.weights)  # bc, kc, q, k
        d_v[at_k] += scores.transpose(-1, -2) @ g[..., :-1]
        d_scores = (g[..., :-1] @ v[at_k].transpose(-1, -2)).add_(g[..., -1:])
        if bias_grad:
            pairs = _sum_cells(scores.mul_(d_scores).sum(0), t, places.cells)  # kc, query cells, g
            d_table[t.heads, h - t.rows.stop : 2 * h - 1 - t.rows.start] += sum_offsets(pairs, places.cells)
        d_scores.mul_(t.weights)
        if seen is not None:  # infinite where a zero key lies far above the maximum: times its features, NaN
            d_scores.clamp_(-_LARGEST[v.dtype], _LARGEST[v.dtype])
        d_q[at_q] += d_scores @ keys
        d_k[at_k] += d_scores.transpose(-1, -2) @ queries
    assert bias is not None  # `upright`
    return Gradients(d_q, d_k, d_v, BiasGradients(d_table.view_as(bias.table) if bias_grad else None))


def log_scale(inputs: Inputs, grid: Grid) -> torch.Tensor:
    """(1, K, N) or (B, K, N): the largest bias that a query's cell sees."""
    table, places = upright(inputs.bias, grid, inputs.v.device)
    return cell_maxima(table, places, seen_cells(inputs.phi_k, table, places))


def _tiles(phi_k: torch.Tensor, bias: torch.Tensor, places: CellGrid, seen: torch.Tensor | None) -> Iterator[_Tile]:
    batch, heads, n, _ = phi_k.shape
    on_cpu = phi_k.device.type == 'cpu'
    (height, width), (h, w) = places.grid, places.cells
    column = cell_of(width, w, phi_k.device)
    cell = (cell_of(height, h, phi_k.device)[:, None] * w + column).flatten()  # N
    keys = min(n, _KEYS if on_cpu else max(_KEYS, _DEVICE_TILE // (heads * n)))
    budget = (_TILE if on_cpu else _DEVICE_TILE) // keys
    rows = max(1, min(h, (_QUERIES if on_cpu else budget // heads) * h // n))  # of cells, with n/h tokens in each
    step = max(1, min(heads, budget // max(rows * n // h, rows * w)))
    items = 1 if seen is not None else max(1, min(batch, budget // (step * max(1, rows * n // h))))
    for head in range(0, heads, step):
        some = slice(head, min(head + step, heads))
        for b in range(0, batch, items):
            dense = DenseWeights(bias[some], places.cells, None if seen is None else seen[some, :, b])
            for y in range(0, h, rows):
                y_end = min(y + rows, h)
                q = slice(*(first_token(i, height, h) * width for i in (y, y_end)))
                c = dense.block(slice(y, y_end))  # kc, q's cells, g
                q_cells = cell[q] - y * w
                for k in range(0, n, keys):
                    at = slice(k, min(k + keys, n))
                    tile = c.index_select(2, cell[at]).index_select(1, q_cells)
                    where = slice(b, min(b + items, batch)), some, slice(y, y_end), q, at
                    yield _Tile(*where, q_cells, cell[at], tile)


def _sum_cells(pairs: torch.Tensor, t: _Tile, cells: Grid) -> torch.Tensor:
    """Sums (kc, q, k) over the tokens of each query cell and each key cell, by products: no scatter, fixed order."""
    of_query = pairs.new_zeros((t.rows.stop - t.rows.start) * cells[1], pairs.shape[1])
    of_query.scatter_(0, t.q_cells[None], 1.0)  # query cells, q
    of_key = pairs.new_zeros(pairs.shape[2], cells[0] * cells[1]).scatter_(1, t.k_cells[:, None], 1.0)  # k, g
    return (of_query @ pairs) @ of_key
