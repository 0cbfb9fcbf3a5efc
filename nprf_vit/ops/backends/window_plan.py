"""How `window` cuts a grid: blocks of queries, and the keys that each of them sees.

# K heads, N tokens, H×W grid, window of offsets up to ±R, ±S
# Queries come in blocks of r rows × s columns; blocks in one strip of s columns share their keys' memory.
# A block sees (2R+r) rows × (2S+s) columns of keys; beyond the grid these are zero features.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..bias import Bias
from ..offsets import offsets_shape, sum_offsets, toeplitz_view
from .interface import Grid

# 8×8 queries per block: 1156 keys for a radius of 13, against 729 in the window itself, and products large enough to
# be fast; a sequence takes 64 queries at a time.
BLOCK, SEQUENCE_BLOCK = (8, 8), (64, 1)
_SCORES = 1 << 20  # scores alive at once, per array


@dataclass
class Plan:
    """The window on its grid, sequences standing upright as N×1 grids."""

    inside: torch.Tensor  # K, 2R+1, 2S+1: c of the offsets that occur
    far: torch.Tensor  # K
    grid: tuple[int, int]
    block: tuple[int, int]
    causal: bool
    upright: bool

    @staticmethod
    def build(bias: Bias | None, grid: Grid, causal: bool, dtype: torch.dtype) -> 'Plan':
        assert bias is not None and bias.far is not None  # `_why_not`
        table, far = crop(bias.table, grid).to(dtype), bias.far.to(dtype)
        upright = grid[0] == 1
        if upright:
            table, grid = table.transpose(1, 2), (grid[1], 1)
        if causal:  # later keys have no weight, and the far constant is not theirs to lose
            table = table.clone()
            table[:, table.shape[1] // 2 + 1 :] = -torch.inf
        top = torch.maximum(table.amax((1, 2)), far)
        inside, far = (table - top[:, None, None]).exp(), (far - top).exp()
        return Plan(inside, far, grid, SEQUENCE_BLOCK if upright else BLOCK, causal, upright)

    @property
    def radius(self) -> Grid:
        return self.inside.shape[1] // 2, self.inside.shape[2] // 2

    @property
    def key_block(self) -> Grid:
        """Rows and columns of keys that a block sees; causal blocks look back only."""
        rows = self.radius[0] * (1 if self.causal else 2) + self.block[0]
        return rows, 2 * self.radius[1] + self.block[1]

    @property
    def padding(self) -> Grid:
        """Rows and columns missing to whole blocks."""
        return -self.grid[0] % self.block[0], -self.grid[1] % self.block[1]

    def pad(self, x: torch.Tensor, own: bool = False) -> torch.Tensor:
        """Tokens (N, ·) of one head as a padded grid (rows, cols, ·): whole blocks, and for keys a margin of radius."""
        x = x.unflatten(0, self.grid)
        rows, cols = self.padding
        if own:
            return F.pad(x, (0, 0, 0, cols, 0, rows))
        r, s = self.radius
        return F.pad(x, (0, 0, s, s + cols, r, rows + (0 if self.causal else r)))

    def unpad(self, x: torch.Tensor, own: bool = False) -> torch.Tensor:
        """(rows, cols, ·) -> (N, ·), the tokens of the grid."""
        r, s = (0, 0) if own else self.radius
        return x[r : r + self.grid[0], s : s + self.grid[1]].flatten(0, 1)

    def tile(self, table: torch.Tensor) -> torch.Tensor:
        """Weights (K, q, k) of a block, the same for every block: zero for keys outside a query's window."""
        (r, s), (rows, cols) = self.block, self.key_block
        table = table if not self.causal else _without_future(table)
        padded = F.pad(table, (s - 1, s - 1, r - 1, r - 1)).contiguous()
        view = toeplitz_view(padded, self.block, (rows, cols))
        return view.flip(1, 2).reshape(table.shape[0], r * s, rows * cols)

    def offset_gradients(
        self, d_weights: torch.Tensor, total: torch.Tensor, bias: torch.Tensor, bias_total: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        rest = -d_bias.sum((1, 2)) if bias_total is None else bias_total - d_bias.sum((1, 2))
        d_far = torch.where(dominates, rest, total - self.far * by_offset.sum((1, 2)))
        if self.upright:
            d_bias = d_bias.transpose(1, 2)
        y, z = ((a - b) // 2 for a, b in zip(bias.shape[1:], d_bias.shape[1:]))
        return F.pad(d_bias, (z, z, y, y)), d_far

    def strips(self) -> Iterator['Strip']:
        for x in range(0, self.grid[1], self.block[1]):
            yield Strip(self, x)


@dataclass
class Strip:
    plan: Plan
    left: int

    def queries(self, x: torch.Tensor, new: torch.Tensor | None = None) -> torch.Tensor:
        """The strip's queries (blocks, q, ·) of a padded grid; or writes new ones."""
        view = x[:, self.left : self.left + self.plan.block[1]]  # rows, s, ·
        if new is not None:
            view.copy_(new.view(view.shape))
        return view.reshape(-1, self.plan.block[0] * self.plan.block[1], x.shape[-1])

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """What each block sees (blocks, k, ·): overlapping views of the strip's columns."""
        rows, cols = self.plan.key_block
        strip = x[:, self.left : self.left + cols].contiguous()  # rows, cols, ·
        return self._overlapping(strip, slice(0, self.blocks), 1)

    def add_keys(self, total: torch.Tensor, part: torch.Tensor, b: slice) -> None:
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

    def chunks(self, scores: int) -> list[slice]:
        step = max(1, _SCORES // scores)
        return [slice(b, min(b + step, self.blocks)) for b in range(0, self.blocks, step)]

    @property
    def blocks(self) -> int:
        return -(-self.plan.grid[0] // self.plan.block[0])

    def _overlapping(self, strip: torch.Tensor, b: slice, apart: int) -> torch.Tensor:
        rows, cols = self.plan.key_block
        channels = strip.shape[-1]
        shape = (b.stop - b.start, rows * cols, channels)
        strides = (apart * self.plan.block[0] * cols * channels, channels, 1)
        return strip.as_strided(shape, strides, strip.storage_offset())


def crop(bias: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The part of a window that occurs on the grid."""
    y, x = (max(0, s // 2 - (n - 1)) for s, n in zip(bias.shape[1:], grid))
    return bias[:, y : bias.shape[1] - y, x : bias.shape[2] - x]


def _without_future(table: torch.Tensor) -> torch.Tensor:
    table = table.clone()
    table[:, table.shape[1] // 2 + 1 :] = 0
    return table
