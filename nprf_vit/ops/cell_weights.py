"""Products between cells, Y_a = Σ_b c_{b-a} U_b: dense, or by FFT for many cells. docs/math.md, "Cells".

# K heads, h×w cells (g = h·w), C channels; sums are (K·g·…, ·), cells of one head together
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from . import toeplitz
from .cell_grid import CellGrid, cell_of
from .offsets import is_wide, row_maxima, toeplitz_view

_BLOCK = 1 << 22  # weights alive at once
# Zero keys may lie above their row's maximum: bounds of their exponents.
_HIGHEST = {torch.float32: 80.0, torch.float64: 600.0}
_CHANNEL_BYTES = 3 << 20  # of one complex array of a chunk of channels, as in `backends.fft`


class DenseWeights:
    """c_ab = exp(b_{b-a} - max_b b_{b-a}) in blocks of query cells' rows: a maximum per row, so no bias is too wide.

    Args:
        bias: (K, 2h-1, 2w-1).
        cells: (h, w).
        seen: (K, g), the cells over which maxima are taken: those that have keys which are not zero. All if None.
    """

    def __init__(self, bias: torch.Tensor, cells: tuple[int, int], seen: torch.Tensor | None = None) -> None:
        self.bias, self.cells, self.seen = bias.contiguous(), cells, seen
        self.count = math.prod(cells)
        rows = max(1, min(_BLOCK // (bias.shape[0] * cells[1] * self.count), cells[0]))
        self.blocks = [slice(y, min(y + rows, cells[0])) for y in range(0, cells[0], rows)]
        self.kept = None
        if len(self.blocks) == 1:
            self.kept = self.block(self.blocks[0])

    def block(self, rows: slice) -> torch.Tensor:
        """Weights (K, q, g) of the query cells in some rows of cells."""
        h, w = self.cells
        if self.kept is not None:
            return self.kept[:, rows.start * w : rows.stop * w]
        count = rows.stop - rows.start
        view = toeplitz_view(self.bias, (count, w), (h, w), h - rows.stop)  # queries in reversed order
        logits = view.reshape(-1, count * w, self.count).flip(1)
        visible = logits if self.seen is None else logits.masked_fill(~self.seen[:, None], -torch.inf)
        # a row of -inf alone: its differences stay -inf
        top = visible.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
        logits = logits.sub_(top)
        # A zero key may lie above the maximum. It counts in its own gradient alone, which must stay finite.
        return (logits if self.seen is None else logits.clamp_(max=_HIGHEST[logits.dtype])).exp_()

    def product(self, sums: torch.Tensor) -> torch.Tensor:
        """Y_a = Σ_b c_ab U_b of sums (K·g·…, ·)."""
        x = self._by_head(sums)
        if self.kept is not None:
            return torch.bmm(self.kept, x).view_as(sums)
        return torch.cat([torch.bmm(c, x) for _, c in self._all()], dim=1).view_as(sums)

    def transposed_product(self, sums: torch.Tensor) -> torch.Tensor:
        """X_b = Σ_a c_ab W_a."""
        x = self._by_head(sums)
        if self.kept is not None:
            return torch.bmm(self.kept.transpose(1, 2), x).view_as(sums)
        out = torch.zeros_like(x)
        for q, c in self._all():
            out.baddbmm_(c.transpose(1, 2), x[:, q])
        return out.view_as(sums)

    def table_gradient(self, d_mixed: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """∂b_δ = Σ_{b-a=δ} c_ab ⟨W_a, U_b⟩, (K, 2h-1, 2w-1); W and U in parts, whose products are added up."""
        parts = [(self._by_head(w), self._by_head(u).transpose(1, 2)) for w, u in zip(d_mixed, sums)]
        out = torch.zeros_like(self.bias)
        for rows, (q, c) in zip(self.blocks, self._all()):
            pairs = torch.bmm(parts[0][0][:, q], parts[0][1])  # K, q, g
            for w, u in parts[1:]:
                pairs.baddbmm_(w[:, q], u)
            pairs.mul_(c)
            out[:, self.cells[0] - rows.stop : 2 * self.cells[0] - 1 - rows.start] += sum_offsets(pairs, self.cells)
        return out

    def _all(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for rows in self.blocks:
            q = slice(rows.start * self.cells[1], rows.stop * self.cells[1])
            yield q, self.block(rows)

    def _by_head(self, sums: torch.Tensor) -> torch.Tensor:
        return sums.view(self.bias.shape[0], self.count, -1)


def seen_cells(phi_k: torch.Tensor, bias: torch.Tensor, places: CellGrid) -> torch.Tensor | None:
    """(K, g, B) which cells have keys that are not zero; None if all have, or if no row needs a maximum of its own.

    On the CPU only: elsewhere nobody looks at values, and row maxima are over all cells.
    """
    if phi_k.device.type != 'cpu' or not is_wide(bias):
        return None
    seen = places.gather(phi_k.ne(0).any(-1, keepdim=True).to(phi_k.dtype), zero=True).amax((1, 2)) > 0
    return None if seen.all() else seen.view(phi_k.shape[1], -1, phi_k.shape[0])


def cell_maxima(bias: torch.Tensor, places: CellGrid, seen: torch.Tensor | None) -> torch.Tensor:
    """What `DenseWeights` takes out of the rows of each token's cell, (1, K, N); (B, K, N) with seen (K, g, B)."""
    if seen is None:
        largest = row_maxima(bias, places.cells).flip(1, 2).flatten(1)[None]  # 1, K, g
    else:
        (h, w), count = places.cells, places.count
        logits = toeplitz_view(bias.contiguous(), (h, w), (h, w)).reshape(-1, count, count).flip(1)  # K, g, g
        some = [logits.masked_fill(~item[:, None], -torch.inf).amax(-1) for item in seen.unbind(2)]
        largest = torch.stack(some).clamp(min=torch.finfo(bias.dtype).min)  # B, K, g
    rows, cols = (cell_of(size, count, bias.device) for size, count in zip(places.grid, places.cells))
    return largest[..., (rows[:, None] * places.cells[1] + cols).flatten()]


def sum_offsets(pairs: torch.Tensor, cells: tuple[int, int]) -> torch.Tensor:
    """Sums (K, r·w, h·w) over equal offsets of key and query cell to (K, r+h-1, 2w-1), in a fixed order."""
    (h, w), rows = cells, pairs.shape[1] // cells[1]
    x = pairs.view(-1, rows, w, h, w).flip(1, 2)
    x = _shear(x.transpose(2, 3)).sum(-2)  # K, r, h, 2w-1
    return _shear(x.permute(0, 3, 1, 2)).sum(-2).transpose(1, 2)


def _shear(x: torch.Tensor) -> torch.Tensor:
    """(..., p, q) -> (..., p, p+q-1), row i moved i places to the right into zeros: equal offsets line up."""
    p, q = x.shape[-2:]
    wide = F.pad(x, (0, p))  # ..., p, q+p; read with a row length of one less
    return wide.flatten(-2)[..., : p * (q + p - 1)].unflatten(-1, (p, p + q - 1))


class SpectralWeights:
    """The same products by FFT over the cells, one maximum per head; c's mean goes through plain sums.

    Args:
        bias: (K, 2h-1, 2w-1).
        cells: (h, w).
        dtype: Of the transforms; `fft.working_dtype` says which holds the tolerance.
    """

    def __init__(self, bias: torch.Tensor, cells: tuple[int, int], dtype: torch.dtype) -> None:
        self.shape, self.lying = bias.shape, cells[1] == 1  # a sequence is transformed along x, as real numbers
        bias, cells = (bias.transpose(1, 2), cells[::-1]) if self.lying else (bias, cells)
        self.cells, self.count = cells, math.prod(cells)
        bias = bias.to(dtype)
        self.c = (bias - bias.amax((1, 2), keepdim=True)).exp_()
        self.mean = self.c.mean((1, 2), keepdim=True)  # K, 1, 1
        self.padded = toeplitz.padded_size(*cells)
        self.spectrum = toeplitz.spectrum(self.c - self.mean, self.padded)[:, None]  # K, 1, Q', P
        points = self.spectrum[:, 0].numel()
        self.step = max(1, _CHANNEL_BYTES // (2 * dtype.itemsize * points))

    def product(self, sums: torch.Tensor) -> torch.Tensor:
        """Y_a = Σ_b c_{b-a} U_b of sums (K·g·…, ·)."""
        return self._apply(sums, self.spectrum)

    def transposed_product(self, sums: torch.Tensor) -> torch.Tensor:
        """X_b = Σ_a c_{b-a} W_a."""
        return self._apply(sums, torch.conj_physical(self.spectrum))

    def table_gradient(self, d_mixed: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """∂b_δ = c_δ Σ_a ⟨W_a, U_{a+δ}⟩, (K, 2h-1, 2w-1); W and U in parts, as `DenseWeights` has them."""
        cross = torch.zeros_like(self.spectrum[:, 0])
        for w, u in zip(map(self._by_head, d_mixed), map(self._by_head, sums)):
            for e in self._channels(u):
                target, source = (self._transform(x[..., e]) for x in (w, u))
                cross += (torch.conj_physical(target) * source).sum(1)
        grad = self.c * toeplitz.table_from_spectrum(cross, self.padded, *self.cells)
        return (grad.transpose(1, 2) if self.lying else grad).reshape(self.shape).to(sums[0].dtype)

    def _apply(self, sums: torch.Tensor, spectrum: torch.Tensor) -> torch.Tensor:
        x = self._by_head(sums)
        out = torch.empty_like(x)  # K, g, C
        for e in self._channels(x):
            some = x[..., e].to(self.c.dtype)
            y = toeplitz.inverse_transform(self._transform(some).mul_(spectrum), self.padded, *self.cells)
            # in the transforms' dtype: where c is small, what the mean brings is taken away again
            out[..., e] = y.flatten(2).transpose(1, 2).add_(some.sum(1, keepdim=True) * self.mean)
        return out.view_as(sums)

    def _transform(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2).to(self.c.dtype).unflatten(2, self.cells)  # K, C, h, w
        return toeplitz.forward_transform(x, self.padded)

    def _channels(self, x: torch.Tensor) -> list[slice]:
        return [slice(e, min(e + self.step, x.shape[-1])) for e in range(0, x.shape[-1], self.step)]

    def _by_head(self, sums: torch.Tensor) -> torch.Tensor:
        return sums.view(self.shape[0], self.count, -1)
