"""Tokens of a grid in the order of the cells that a coarser grid lays over it. docs/math.md, "Cells".

# B batch, K heads, N tokens, H×W grid, h×w cells (g = h·w), t = ty·tx places in a cell
# Along an axis, token y of H is in cell ⌊(y+½)h/H⌋; cells hold ⌊H/h⌋ or ⌈H/h⌉ tokens, the places are ⌈H/h⌉.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .bias import Bias
from .offsets import expand_table


def cell_of(size: int, count: int, device: torch.device | str = 'cpu') -> torch.Tensor:
    """The cell (size,) of each token along an axis, ⌊(y+½)h/H⌋ in integers."""
    return torch.arange(1, 2 * size, 2, device=device) * count // (2 * size)


def first_token(cell: int, size: int, count: int) -> int:
    """The first token of a cell along an axis: the smallest y with (y+½)h/H ≥ cell."""
    return (2 * cell * size + count - 1) // (2 * count)


def expand_cells(table: torch.Tensor, cells: Sequence[int], grid_size: Sequence[int]) -> torch.Tensor:
    """Gather the dense bias B[k, i, j] = table[k, offset of key j's cell from query i's]; O(N²) memory.

    Args:
        table: (K, 2h-1, 2w-1) or (K, 2h-1).
        cells: (h, w) or (h,).
        grid_size: (H, W) or (N,).

    Returns:
        (K, N, N).
    """
    cell = torch.zeros(1, dtype=torch.long, device=table.device)
    for size, count in zip(grid_size, cells):
        cell = (cell[:, None] * count + cell_of(size, count, table.device)).flatten()  # N
    return expand_table(table, cells)[:, cell][:, :, cell]


class CellGrid:
    """Where the tokens of a grid lie in its cells, and the copies between the two orders.

    Where cells differ in size, the smaller ones have places without a token.
    """

    def __init__(self, grid: tuple[int, int], cells: tuple[int, int], device: torch.device) -> None:
        self.grid, self.cells, self.device = grid, cells, device
        self.count = math.prod(cells)
        self.places = tuple(-(-size // count) for size, count in zip(grid, cells))  # ty, tx
        self.even = all(size % count == 0 for size, count in zip(grid, cells))
        self._indices: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        if not self.even:
            sizes = list(zip(grid, cells, self.places))
            self.y = _axis(*sizes[0], device)
            self.x = self.y if sizes[0] == sizes[1] else _axis(*sizes[1], device)

    def gather(self, x: torch.Tensor, zero: bool = False) -> torch.Tensor:
        """(B, K, N, C) -> (K·g·B, t, C) contiguous; places without a token hold some other token's, or `zero`."""
        (h, w), (ty, tx), channels = self.cells, self.places, x.shape[-1]
        if self.even:
            x = x.unflatten(2, (h, ty, w, tx)).permute(1, 2, 4, 0, 3, 5, 6)
            return x.reshape(-1, ty * tx, channels)
        batch, heads = x.shape[:2]
        # by rows of a matrix: more than twice as fast as along a dimension within
        x = x.reshape(-1, channels).index_select(0, self._index(batch, heads)[0])
        if zero:  # cells lack at most one row and one column
            places = x.view(heads, h, w, batch, ty, tx, channels)
            places[..., -1, :, :].mul_(self.y.full[:, None, None, None, None])
            places[..., -1, :].mul_(self.x.full[:, None, None, None])
        return x.view(-1, ty * tx, channels)

    def scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """(K·g·B, t, C) back into (B, K, N, C)."""
        (h, w), (ty, tx), (batch, heads, _, channels) = self.cells, self.places, out.shape
        if self.even:
            x = x.view(heads, h, w, batch, ty, tx, channels)
            out.unflatten(2, (h, ty, w, tx)).copy_(x.permute(3, 0, 1, 4, 2, 5, 6))
            return
        rows = x.view(-1, channels).index_select(0, self._index(batch, heads)[1])
        out.copy_(rows.view(out.shape))

    def _index(self, batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each place (K, h, w, B, ty, tx) its token's row of (B·K·N), and for each token (B, K, H, W) its place's.

        Made once for all copies of one shape: on a GPU each of these operations is a launch.
        """
        if (batch, heads) not in self._indices:
            (height, width), (ty, tx) = self.grid, self.places
            rows = torch.arange(0, batch * heads * height * width, height * width, device=self.device)
            token = (self.y.token * width)[:, None, :, None] + self.x.token[:, None]  # h, w, ty, tx
            first = rows.view(batch, heads).t()[:, None, None, :, None, None]  # K, 1, 1, B, 1, 1
            token = first + token[:, :, None]
            cell_size = batch * ty * tx  # rows between a cell and the next
            place_y = self.y.cell * (self.cells[1] * cell_size) + self.y.place * tx
            place = place_y[:, None] + (self.x.cell * cell_size + self.x.place)  # H, W
            item = torch.arange(0, cell_size, ty * tx, device=self.device)
            head = torch.arange(0, heads * self.count * cell_size, self.count * cell_size, device=self.device)
            place = (item[:, None] + head)[:, :, None, None] + place
            self._indices[batch, heads] = token.flatten(), place.flatten()
        return self._indices[batch, heads]


def upright(bias: Bias | None, grid: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, CellGrid]:
    """The table (K, 2h-1, 2w-1) of a bias between cells, and the places of the tokens.

    A sequence becomes a grid of N rows, whose cells blocks of rows may divide.
    """
    assert bias is not None and bias.cells is not None  # else no backend of cells is chosen
    rows, cols = bias.cells
    if grid[0] > 1:
        return bias.table, CellGrid(grid, (rows, cols), device)
    return bias.table.reshape(bias.table.shape[0], -1, 1), CellGrid((grid[1], 1), (cols, 1), device)


class _Axis(NamedTuple):
    """Tokens and cells along one axis of H tokens in h cells of t places."""

    token: torch.Tensor  # (h, t), of each place; some other token where there is none
    full: torch.Tensor  # (h,) of bool: a token in every place
    cell: torch.Tensor  # (H,), of each token
    place: torch.Tensor  # (H,), of each token within its cell


def _axis(size: int, count: int, places: int, device: torch.device) -> _Axis:
    first = (torch.arange(count + 1, device=device) * (2 * size) + (count - 1)) // (2 * count)
    token = (first[:-1, None] + torch.arange(places, device=device)).clamp(max=size - 1)
    cell = cell_of(size, count, device)
    return _Axis(token, first.diff() == places, cell, torch.arange(size, device=device) - first[cell])
