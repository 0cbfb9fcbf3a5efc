"""A bias between cells of tokens: three matrix products, no N². docs/math.md, "Cells".

    U_b = Σ_{j in cell b} φk_jᵀ [v_j, 1]        Y_a = Σ_b c_{b-a} U_b        [num, den]_i = φq_i Y_{cell(i)}

O((N + g²)·M·D) time for g cells, O(N(M+D) + g·M·D + g²) memory per head.

# B batch, K heads, N tokens, M features, E value columns, H×W grid, h×w cells (g = h·w), t = ty·tx places in a cell
"""

import math
from typing import NamedTuple

import torch

from ..backends.interface import Case, Grid
from ..cell_grid import cell_of
from ..offsets import expand_table
from .interface import Algorithm, Call, Scaled, parts, row_top, weight


class _Places(NamedTuple):
    """Where tokens lie in cells; sizes may be symbols, so that no shape decides on a branch."""

    token: torch.Tensor  # g·t: the token in each place, any where there is none
    filled: torch.Tensor  # g·t, bool: whether there is one
    place: torch.Tensor  # N: the place of each token
    cell: torch.Tensor  # N: the cell of each token
    cells: int  # g
    size: int  # t

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(B, K, N, C) -> (B, K, g, t, C)."""
        x = x.index_select(2, self.token)
        return x.reshape(*x.shape[:2], self.cells, self.size, x.shape[3])


def _sums(call: Call) -> Scaled:
    assert call.bias is not None and call.bias.cells is not None  # `_serves`
    rows, cols = call.bias.cells
    places = _places(call.grid, (rows, cols), call.v.device)
    bias = expand_table(call.bias.table, (rows, cols))  # K, g, g
    top = row_top(_visible(bias, call.key_mask, places).amax(-1), call.others)  # K, g or B, K, g
    (batch, heads, _, m), columns = call.phi_q.shape, call.v.shape[-1]
    keys = places.gather(call.phi_k) * places.filled.to(call.v.dtype).reshape(places.cells, places.size, 1)
    sums = keys.transpose(-1, -2) @ places.gather(call.v)  # B, K, g, M, E
    mixed = weight(bias, top[..., None]) @ sums.reshape(batch, heads, places.cells, m * columns)
    out = places.gather(call.phi_q) @ mixed.reshape(batch, heads, places.cells, m, columns)  # B, K, g, t, E
    out = out.reshape(batch, heads, places.cells * places.size, columns).index_select(2, places.place)
    return Scaled(out, top.index_select(-1, places.cell))


def _visible(bias: torch.Tensor, key_mask: torch.Tensor | None, places: _Places) -> torch.Tensor:
    """The bias (K, g, g), or (B, K, g, g) without the cells that have no key left."""
    if key_mask is None:
        return bias
    seen = key_mask.index_select(1, places.token) & places.filled  # B, g·t
    seen = seen.reshape(seen.shape[0], places.cells, places.size).any(-1)
    return bias.masked_fill(~seen[:, None, None, :], -torch.inf)


def _places(grid: Grid, cells: Grid, device: torch.device) -> _Places:
    (token_y, filled_y, cell_y, rest_y), (token_x, filled_x, cell_x, rest_x) = (
        _axis(size, count, device) for size, count in zip(grid, cells)
    )
    ty, tx = token_y.shape[1], token_x.shape[1]
    token = token_y[:, None, :, None] * grid[1] + token_x[None, :, None, :]  # h, w, ty, tx
    filled = filled_y[:, None, :, None] & filled_x[None, :, None, :]
    cell = cell_y[:, None] * cells[1] + cell_x  # H, W
    place = (cell * ty + rest_y[:, None]) * tx + rest_x
    sizes = cells[0] * cells[1], ty * tx
    return _Places(token.flatten(), filled.flatten(), place.flatten(), cell.flatten(), *sizes)


def _axis(size: int, count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tokens (h, ty) in the places of an axis, whether they are any; cells (H,) of the tokens and places in them."""
    first = (2 * torch.arange(count + 1, device=device) * size + count - 1) // (2 * count)  # of each cell
    token = first[:-1, None] + torch.arange(parts(size, count), device=device)
    cell = cell_of(size, count, device)
    rest = torch.arange(size, device=device) - first.index_select(0, cell)
    return token.clamp(max=size - 1), token < first[1:, None], cell, rest


def _serves(case: Case) -> bool:
    return case.cells is not None


def _cost(case: Case) -> float:
    assert case.cells is not None  # `_serves`
    places = math.prod(-(-size // count) * count for size, count in zip(case.grid, case.cells))
    return case.m * (case.d + 1.0) * (2 * places + math.prod(case.cells) ** 2)


ALGORITHM = Algorithm('cells', _serves, _cost, _sums)
