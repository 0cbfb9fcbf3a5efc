"""Tokens of a grid as a list of tiles, in which the neighbours of a tile lie at constant distances.

# N tokens, H×W grid, window of offsets up to ±R, ±S; g heads
# Tiles of s = sy·sx tokens, TY×TX of them. A row of empty tiles lies above each head's, and a column of empty ones left
# of them: L = (TY+1)(TX+1) tiles per head. A sequence stands upright, as an N×1 grid.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .interface import Grid

_SIDE, _SEQUENCE_SIDE = 8, 64  # of the smallest tile: products of fewer tokens leave a GPU idle


class Plan(NamedTuple):
    """How a grid is cut into tiles; a sequence stands upright, as an N×1 grid."""

    grid: Grid
    tile: Grid  # sy, sx
    rows: tuple[int, ...]  # neighbours, in tiles: -1, 0, 1, without 1 if causal, 0 alone where one tile spans the grid
    cols: tuple[int, ...]
    causal: bool
    upright: bool

    @property
    def tiles(self) -> Grid:
        """Rows and columns of a head's list, empty ones included."""
        (height, width), (sy, sx), (above, left) = self.grid, self.tile, self.empty
        return -(-height // sy) + above, -(-width // sx) + left

    @property
    def empty(self) -> Grid:
        """Empty rows above and empty columns to the left."""
        return int(len(self.rows) > 1), int(len(self.cols) > 1)

    @property
    def size(self) -> int:
        return self.tile[0] * self.tile[1]

    @property
    def strip(self) -> int:
        """Keys of the neighbours in one row of tiles: these lie side by side in the list."""
        return len(self.cols) * self.size

    def pairs(self) -> int:
        """Scores of one head."""
        rows, cols = self.tiles
        return rows * cols * self.size * self.strip * len(self.rows)


def plan(bias: torch.Tensor, grid: Grid, causal: bool) -> Plan | None:
    """Tiles for a window (K, 2R+1, 2S+1), or None where a dense product has no more scores."""
    upright = grid[0] == 1
    radius = bias.shape[1] // 2, bias.shape[2] // 2
    if upright:
        grid, radius = grid[::-1], radius[::-1]
    smallest = _SEQUENCE_SIDE if upright else _SIDE
    tall, rows = _side(grid[0], max(radius[0], smallest))
    wide, cols = _side(grid[1], max(radius[1], smallest))
    if rows == cols == (0,):
        return None
    found = Plan(grid, (tall, wide), (-1, 0) if causal else rows, cols, causal, upright)
    return found if found.pairs() < (grid[0] * grid[1]) ** 2 else None


def _side(n: int, smallest: int) -> tuple[int, tuple[int, ...]]:
    """Tokens of a tile along one axis, and its neighbours: three tiles have the scores of one that spans the axis."""
    return (n, (0,)) if n <= 3 * smallest else (smallest, (-1, 0, 1))


class Tiles(NamedTuple):
    """A list of tiles with empty ones before and after it."""

    memory: torch.Tensor  # margin + tiles + margin, s, ·
    margin: int
    across: int  # tiles of a row
    plan: Plan

    @property
    def own(self) -> torch.Tensor:
        return self.memory[self.margin : self.memory.shape[0] - self.margin]

    def strip(self, row: int) -> torch.Tensor:
        """(tiles, strip, ·): the neighbours in one row of tiles, of each tile, overlapping in memory."""
        tile, token, _ = self.memory.stride()
        first = self.margin + self.plan.rows[row] * self.across + self.plan.cols[0]
        shape = self.own.shape[0], self.plan.strip, self.memory.shape[2]
        return self.memory.as_strided(shape, (tile, token, 1), self.memory.storage_offset() + first * tile)

    def columns(self, size: int) -> list['Tiles']:
        """Tiles of the first, the next, ... `size` columns."""
        return [self._replace(memory=x) for x in self.memory.split(size, dim=2)]

    def neighbour(self, row: int, col: int) -> torch.Tensor:
        """(tiles, s, ·): one neighbour of each tile."""
        first = self.margin + self.plan.rows[row] * self.across + self.plan.cols[col]
        return self.memory[first : first + self.own.shape[0]]

    @staticmethod
    def around(x: torch.Tensor, p: Plan) -> 'Tiles':
        """Tiles x (tiles, s, ·) with room for their neighbours."""
        margin = p.empty[0] * p.tiles[1] + p.empty[1]
        return Tiles(F.pad(x, (0, 0, 0, 0, margin, margin)), margin, p.tiles[1], p)


def to_tiles(x: torch.Tensor, p: Plan) -> Tiles:
    """Tokens (g, N, ·) as tiles; what lies beyond the grid, and between heads, is zero."""
    (ty, tx), (sy, sx) = p.tiles, p.tile
    top, left = (e * s for e, s in zip(p.empty, p.tile))
    x = x.unflatten(1, p.grid)
    # a head of zeros before and after: more than the neighbours need, in one operation
    x = F.pad(x, (0, 0, left, tx * sx - left - p.grid[1], top, ty * sy - top - p.grid[0], 1, 1))
    tiles = x.view(-1, ty, sy, tx, sx, x.shape[-1]).transpose(2, 3)  # g+2, TY, TX, sy, sx, ·
    return Tiles(tiles.reshape(-1, p.size, x.shape[-1]), ty * tx, tx, p)


def to_tokens(x: torch.Tensor, p: Plan, out: torch.Tensor) -> None:
    """Writes tiles (g·L, s, ·) into tokens (g, N, ·)."""
    (ty, tx), (sy, sx) = p.tiles, p.tile
    x = x.view(-1, ty, tx, sy, sx, x.shape[-1]).transpose(2, 3)  # g, TY, sy, TX, sx, ·
    x = x[:, p.empty[0] :, :, p.empty[1] :].flatten(3, 4).flatten(1, 2)  # a copy
    out.unflatten(1, p.grid).copy_(x[:, : p.grid[0], : p.grid[1]])


def sum_offsets(x: torch.Tensor, queries: Grid, keys: Grid) -> torch.Tensor:
    """Sums (g, queries backwards, keys) over equal offsets: (g, q_rows+k_rows-1, q_cols+k_cols-1), in a fixed order.

    Adjoint of `toeplitz_view`. It is what `fold` does, each element of the table gathering its own: one launch, no
    sheared copy as in `offsets.sum_offsets`.
    """
    rows, cols = queries[0] + keys[0] - 1, queries[1] + keys[1] - 1
    return F.fold(x, (rows, cols), queries)[:, 0]


def head_groups(batch: int, heads: int, fit: int) -> Iterator[slice]:
    """Of B·K heads as many at once as fit: those of several whole batch items, or an equal part of one item's."""
    group = max(1, min(fit, batch * heads))
    if group >= heads:
        group -= group % heads
    else:
        group = max(g for g in range(1, group + 1) if heads % g == 0)
    for g in range(0, batch * heads, group):
        yield slice(g, min(g + group, batch * heads))
