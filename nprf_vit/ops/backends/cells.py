"""Products for a bias between cells of tokens: three matrix products, no N². docs/math.md, "Cells".

    U_b = Σ_{j in cell b} φk_jᵀ [v_j, 1]        Y_a = Σ_b c_{b-a} U_b        [num, den]_i = φq_i Y_{cell(i)}

O(N·M·D + g²·M·D) time for g cells, or O(g log g·M·D) in place of g² by FFT; O(N(M+D) + g·M·D) memory.

# B batch, K heads, N tokens, M features, D head dim, H×W grid, h×w cells (g = h·w), t places in a cell
# A chunk is kc heads of bc batch items. Its tokens are (kc·g·bc, t, ·), the sums of its cells (kc·g·bc, ·).
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .. import toeplitz
from ..bias import BiasGradients
from ..cell_grid import CellGrid, upright
from ..cell_weights import DenseWeights, SpectralWeights, cell_maxima, seen_cells
from . import fft
from .interface import Backend, Case, Gradients, Grid, Inputs, Product, Sums, narrow, own_dtype, widen

# Bytes of the sums of a chunk's cells: on a CPU what stays in cache, elsewhere few launches.
_CPU_BYTES, _DEVICE_BYTES = 4 << 20, 512 << 20
# Zero keys may lie above their row's maximum: bound of the sums that make their gradients.
_LARGEST = {torch.float32: 1e30, torch.float64: 1e290}


def forward(inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype) -> Sums:
    """The sums for a bias (K, 2h-1, 2w-1) between cells (h, w)."""
    phi_q, phi_k, v, bias = inputs
    table, places = upright(bias, grid, v.device)
    seen = seen_cells(phi_k, table, places)
    num, den = v.new_empty(v.shape), v.new_empty(*v.shape[:-1], 1)
    for b, heads, weights in _chunks(v, phi_q.shape[-1], table, places, seen):
        mixed = _mix(weights.product, _sums(places.gather(phi_k[b, heads], zero=True), places.gather(v[b, heads])))
        queries = places.gather(phi_q[b, heads])  # kc·g·bc, t, M
        places.scatter(torch.bmm(queries, mixed.of_values), num[b, heads])
        places.scatter(torch.bmm(queries, mixed.of_ones), den[b, heads])
    return Sums(num, den.squeeze(-1))


def backward(
    inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype, grad: torch.Tensor, bias_grad: bool
) -> Gradients:
    """With W_a = Σ_{i in a} φq_iᵀ G_i and X_b = Σ_a c_{b-a} W_a, the gradients are products with Y and X."""
    phi_q, phi_k, v, bias = inputs
    table, places = upright(bias, grid, v.device)
    seen = seen_cells(phi_k, table, places)
    if seen is not None and v.dtype == torch.float32:
        return narrow(backward(widen(inputs), grid, causal, torch.float64, grad.double(), bias_grad))
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (phi_q, phi_k, v))
    d_table = torch.zeros_like(table)
    for b, heads, weights in _chunks(v, phi_q.shape[-1], table, places, seen):
        queries, keys = (places.gather(x[b, heads], zero=True) for x in (phi_q, phi_k))  # kc·g·bc, t, M
        values, g = places.gather(v[b, heads]), places.gather(grad[b, heads])
        g_num, g_den = g[..., :-1], g[..., -1:]
        sums, d_mixed = _sums(keys, values), _sums(queries, g_num, g_den)
        if bias_grad:
            d_table[heads] += weights.table_gradient(d_mixed, sums)
        mixed = _mix(weights.product, sums)
        part = torch.bmm(g_num, mixed.of_values.transpose(1, 2))
        places.scatter(part.addcmul_(g_den, mixed.of_ones.transpose(1, 2)), d_q[b, heads])
        d_sums = _mix(weights.transposed_product, d_mixed)
        if seen is not None:  # infinite where a zero key lies far above the maximum: times its values, NaN
            for x in d_sums:
                x.clamp_(-_LARGEST[v.dtype], _LARGEST[v.dtype])
        part = torch.bmm(values, d_sums.of_values.transpose(1, 2))
        places.scatter(part.add_(d_sums.of_ones.transpose(1, 2)), d_k[b, heads])
        places.scatter(torch.bmm(keys, d_sums.of_values), d_v[b, heads])
    assert bias is not None  # `upright`
    return Gradients(d_q, d_k, d_v, BiasGradients(d_table.view_as(bias.table) if bias_grad else None))


def _chunks(
    v: torch.Tensor, m: int, table: torch.Tensor, places: CellGrid, seen: torch.Tensor | None
) -> Iterator[tuple[slice, slice, DenseWeights | SpectralWeights]]:
    """Batch items and heads whose cells' sums fit the budget, with the weights of these heads."""
    batch, heads, _, d = v.shape
    on_cpu = _on_cpu(v)
    head_bytes = places.count * m * (d + 1) * v.dtype.itemsize
    budget = (_CPU_BYTES if on_cpu else _DEVICE_BYTES) // head_bytes
    items = 1 if on_cpu else max(1, min(budget // heads, batch))
    step = max(1, min(budget // items, heads))
    working = _transform_dtype(v, table, places, seen)
    for h in range(0, heads, step):
        some = slice(h, min(h + step, heads))
        weights: DenseWeights | SpectralWeights
        if working is not None:
            weights = SpectralWeights(table[some], places.cells, working)
        else:
            weights = DenseWeights(table[some], places.cells)
        for b in range(0, batch, items):
            of_item = weights if seen is None else DenseWeights(table[some], places.cells, seen[some, :, b])
            yield slice(b, min(b + items, batch)), some, of_item


def _transform_dtype(
    v: torch.Tensor, table: torch.Tensor, places: CellGrid, seen: torch.Tensor | None
) -> torch.dtype | None:
    """In which dtype the product between cells goes through FFTs; None where it is a dense one."""
    if not _on_cpu(v) or seen is not None or _spectral_cost(places.cells) >= places.count**2:
        return None
    return fft.working_dtype(table, False, v.dtype)


def log_scale(inputs: Inputs, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """One maximum per head (K, 1) by FFT, else the largest bias that a query's cell sees, (1, K, N) or (B, K, N)."""
    table, places = upright(inputs.bias, grid, inputs.v.device)
    seen = seen_cells(inputs.phi_k, table, places)
    if _transform_dtype(inputs.v, table, places, seen) is not None:
        return table.amax((1, 2))[:, None]
    return cell_maxima(table, places, seen)


def _on_cpu(v: torch.Tensor) -> bool:
    return v.device.type == 'cpu'


class _CellSums(NamedTuple):
    """Of each cell and item. Two tensors: into a part of one, bmm multiplies one by one, 13 times as slow."""

    of_values: torch.Tensor  # Σ φkᵀ v, (cells, M, D)
    of_ones: torch.Tensor  # Σ φkᵀ, (cells, M, 1)


def _sums(x: torch.Tensor, y: torch.Tensor, last: torch.Tensor | None = None) -> _CellSums:
    """Σ_t x_tᵀ[y_t, last_t] of each cell; `last` is ones if None."""
    x = x.transpose(1, 2)  # cells, M, t
    # a column of ones in y would do both at once, but 65 columns cost a quarter more than 64 and a sum
    return _CellSums(torch.bmm(x, y), x.sum(2, keepdim=True) if last is None else torch.bmm(x, last))


def _mix(product: Callable[[torch.Tensor], torch.Tensor], sums: _CellSums) -> _CellSums:
    return _CellSums(*map(product, sums))


def _spectral_cost(cells: Grid) -> float:
    """Of the product between cells by FFT, per channel, in multiply-adds of the dense one."""
    points = math.prod(toeplitz.padded_size(*(cells if cells[1] > 1 else cells[::-1])))
    return fft.fft_point('cpu') * points * math.log2(max(2, points))


def _why_not(case: Case) -> str | None:
    return 'there are no cells' if case.cells is None else None


def _cost(case: Case) -> float | None:
    """Two products of tokens with their cell's sums, and one between cells, dense or by FFT."""
    assert case.cells is not None  # `_why_not`
    places = math.prod(-(-size // count) * count for size, count in zip(case.grid, case.cells))
    return case.m * (case.d + 1) * (2.0 * places + min(math.prod(case.cells) ** 2, _spectral_cost(case.cells)))


# batched: off the CPU it reads nothing on the host by itself, and backends/batched.py calls it
BACKEND = Backend('cells', _why_not, _cost, Product(forward, backward, own_dtype, log_scale=log_scale))
