"""Tokens of a grid in the order of the cells that a coarser grid lays over it. docs/math.md, "Cells".

# B batch, K heads, N tokens, H×W grid, h×w cells (g = h·w), t = ty·tx places in a cell
# Along an axis, token y of H is in cell ⌊(y+½)h/H⌋; cells hold ⌊H/h⌋ or ⌈H/h⌉ tokens, the places are ⌈H/h⌉.
"""

import math
from collections.abc import Sequence

import torch

from .bias import Bias
from .offsets import expand_table


def cell_of(size: int, count: int, device: torch.device | str = 'cpu') -> torch.Tensor:
    """The cell (size,) of each token along an axis, ⌊(y+½)h/H⌋ in integers."""
    return (2 * torch.arange(size, device=device) + 1) * count // (2 * size)


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
        self.grid, self.cells = grid, cells
        self.count = math.prod(cells)
        self.places = tuple(-(-size // count) for size, count in zip(grid, cells))  # ty, tx
        self.even = all(size % count == 0 for size, count in zip(grid, cells))
        if self.even:
            return
        axes = [_axis(*sizes, device) for sizes in zip(grid, cells, self.places)]
        (token_y, self.full_y, place_y), (token_x, self.full_x, place_x) = axes
        (ty, tx), (_, w) = self.places, cells
        token = token_y[:, None, :, None] * grid[1] + token_x[None, :, None, :]  # h, w, ty, tx
        self.token = token.flatten()
        cell_y, rest_y, cell_x, rest_x = place_y // ty, place_y % ty, place_x // tx, place_x % tx
        place = ((cell_y[:, None] * w + cell_x) * ty + rest_y[:, None]) * tx + rest_x  # H, W
        self.place = place.flatten()

    def gather(self, x: torch.Tensor, zero: bool = False) -> torch.Tensor:
        """(B, K, N, C) -> (K·g·B, t, C) contiguous; places without a token hold some other token's, or `zero`."""
        (h, w), (ty, tx), channels = self.cells, self.places, x.shape[-1]
        if self.even:
            x = x.unflatten(2, (h, ty, w, tx)).permute(1, 2, 4, 0, 3, 5, 6)
            return x.reshape(-1, ty * tx, channels)
        batch, heads, n = x.shape[:3]
        first = torch.arange(batch * heads, device=x.device).mul_(n).view(batch, heads).t()  # K, B
        token = first[:, None, :, None] + self.token.view(-1, 1, ty * tx)  # K, g, B, t
        # by rows of a matrix: more than twice as fast as along a dimension within
        x = x.reshape(-1, channels).index_select(0, token.flatten())
        if zero:  # cells lack at most one row and one column
            places = x.view(heads, h, w, batch, ty, tx, channels)
            places[..., -1, :, :].mul_(self.full_y.to(x.dtype)[:, None, None, None, None])
            places[..., -1, :].mul_(self.full_x.to(x.dtype)[:, None, None, None])
        return x.view(-1, ty * tx, channels)

    def scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """(K·g·B, t, C) back into (B, K, N, C)."""
        (h, w), (ty, tx), (batch, heads, _, channels) = self.cells, self.places, out.shape
        if self.even:
            x = x.view(heads, h, w, batch, ty, tx, channels)
            out.unflatten(2, (h, ty, w, tx)).copy_(x.permute(3, 0, 1, 4, 2, 5, 6))
            return
        cell, rest = self.place // (ty * tx), self.place % (ty * tx)
        head, item = torch.arange(heads, device=x.device), torch.arange(batch, device=x.device)
        cell = (head[:, None] * self.count + cell) * batch + item[:, None, None]  # B, K, N
        out.copy_(x.view(-1, channels).index_select(0, (cell * (ty * tx) + rest).flatten()).view(out.shape))


def upright(bias: Bias | None, grid: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, CellGrid]:
    """The table (K, 2h-1, 2w-1) of a bias between cells, and the places of the tokens.

    A sequence becomes a grid of N rows, whose cells blocks of rows may divide.
    """
    assert bias is not None and bias.cells is not None  # else no backend of cells is chosen
    rows, cols = bias.cells
    if grid[0] > 1:
        return bias.table, CellGrid(grid, (rows, cols), device)
    return bias.table.reshape(bias.table.shape[0], -1, 1), CellGrid((grid[1], 1), (cols, 1), device)


def _axis(size: int, count: int, places: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tokens (h·ty as h, ty) in the places, whether each cell is full (h,), and places (H,) of the tokens."""
    cell = torch.arange(count + 1, device=device)
    first = (2 * cell * size + count - 1) // (2 * count)
    token = (first[:-1, None] + torch.arange(places, device=device)).clamp(max=size - 1)  # h, ty
    own = cell_of(size, count, device)
    place = own * places + torch.arange(size, device=device) - first[own]
    return token, first.diff() == places, place
