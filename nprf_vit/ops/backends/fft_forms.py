"""The (block-)Toeplitz products of `fft` as circular ones: over a whole grid, or over the levels of a causal sequence.

# K heads, H×W grid, P×Q padded grid, Q' = Q/2+1; a chunk is g of the B·K heads × f features × e columns
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .. import toeplitz
from ..scratch import Scratch
from .interface import Grid

# Bytes of one complex array of a chunk on a grid, and on a sequence, which has one transform less in flight: the
# fastest on 32 MB of shared cache. Half or twice as much costs up to a fifth more, ten times as much four times.
_GRID_BYTES, _SEQUENCE_BYTES = 3 << 20, 6 << 20
# Causal: dense below this length; above it each level adds the left half of a segment to its right half.
CAUSAL_BLOCK = 512


class WholeGrid:
    """The non-causal product: every token of the grid is a source and a target."""

    def __init__(self, c: torch.Tensor, grid: Grid) -> None:
        self.grid = grid
        self.padded = toeplitz.padded_size(*grid)
        self.spectrum = toeplitz.spectrum(c, self.padded)  # K, Q', P
        self.cells = self.padded[0] * (self.padded[1] // 2 + 1)
        self.chunk_bytes = _GRID_BYTES if self.padded[0] > 1 else _SEQUENCE_BYTES
        self.scratch = Scratch()

    def source(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, self.grid)

    target = source

    def source_transform(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Transform of a·b, as toeplitz.forward_transform, in padding that stays zero from chunk to chunk."""
        (height, width), (p, q) = self.grid, self.padded
        shape = torch.broadcast_shapes(a.shape, b.shape)[:-2]
        x = self.scratch.buffer(('x', *shape), (*shape, height, q), a, zero=True)
        torch.mul(a, b, out=x[..., :width])
        f = torch.fft.rfft(x, dim=-1).transpose(-1, -2)  # ..., Q', H
        if p == 1:
            return f
        y = self.scratch.buffer(('y', *shape), (*shape, q // 2 + 1, p), f, zero=True)
        y[..., :height] = f
        return torch.fft.fft(y, dim=-1)  # ..., Q', P

    target_transform = source_transform

    def target_inverse(self, f: torch.Tensor) -> torch.Tensor:
        return toeplitz.inverse_transform(f, self.padded, *self.grid)

    source_inverse = target_inverse

    def correlation(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return (torch.conj_physical(target) * source).sum((1, 2))  # g, Q', P

    def add_offsets(self, d_c: torch.Tensor, cross: torch.Tensor) -> None:
        d_c += toeplitz.table_from_spectrum(cross, self.padded, *self.grid)


class Halves:
    """One level of the causal product: in each segment of 2L tokens the left half is source, the right half target.

    Later tokens never enter an earlier one's sums, so rounding cannot look ahead. Lags run from 1 to 2L-1: a circular
    product of length 2L holds them.
    """

    chunk_bytes = _SEQUENCE_BYTES

    def __init__(self, c: torch.Tensor, half: int, n: int) -> None:
        self.half, self.n = half, n
        lags = c[:, 0, : n - 1].flip(-1)[:, : 2 * half - 1]  # K, lags 1, 2, …
        kernel = c.new_zeros(c.shape[0], 1, 2 * half)
        kernel[:, 0, 1 : 1 + lags.shape[1]] = lags
        self.lag_count = lags.shape[1]
        self.spectrum = torch.fft.rfft(kernel, dim=-1)  # K, 1, Q'
        self.segments = (n - 1 - half) // (2 * half) + 1  # those whose right half exists
        self.cells = self.segments * (half + 1)

    def _segments(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : self.segments * 2 * self.half].unflatten(-1, (self.segments, 2 * self.half))

    def source(self, x: torch.Tensor) -> torch.Tensor:
        return self._segments(x)[..., : self.half]

    def target(self, x: torch.Tensor) -> torch.Tensor:
        return self._segments(x)[..., self.half :]

    def source_transform(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(a * b, n=2 * self.half, dim=-1)

    def target_transform(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(F.pad(a * b, (self.half, 0)), dim=-1)

    def target_inverse(self, f: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(f, n=2 * self.half, dim=-1)[..., self.half :]

    def source_inverse(self, f: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(f, n=2 * self.half, dim=-1)[..., : self.half]

    def correlation(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return (torch.conj_physical(target) * source).sum((1, 2, 3)).unsqueeze(1)  # g, 1, Q'

    def add_offsets(self, d_c: torch.Tensor, cross: torch.Tensor) -> None:
        by_lag = torch.fft.irfft(cross[:, 0], n=2 * self.half, dim=-1)  # K, 2L: at -lag modulo 2L
        by_lag = by_lag.flip(-1)[:, : self.lag_count]  # index l-1 is lag l
        d_c[:, 0, self.n - 1 - self.lag_count : self.n - 1] += by_lag.flip(-1)


def forms(c: torch.Tensor, grid: Grid, causal: bool) -> Iterator[WholeGrid | Halves]:
    if not causal:
        yield WholeGrid(c, grid)
        return
    n, half = grid[1], CAUSAL_BLOCK
    while half < n:
        yield Halves(c, half, n)
        half *= 2
