"""A bias that is constant beyond a window: dense products between neighbouring tiles, sums over tiles for the rest.

    Σ_j c_{j-i} s_ij v_j = Σ_{j in the tiles around i's} c_{j-i} s_ij v_j + c_far φq_i Σ_{j in other tiles} φk_jᵀ v_j

The sums over other tiles are running sums from all four sides. Nothing is subtracted, so no bias is too steep.
O(N·(2.5R)(2.5S)(M+D)) time and O(N·tile·(M+D)) memory, linear in N. docs/math.md, "Window".

# B batch, K heads, N tokens, M features, E value columns, H×W grid, window of offsets up to ±R, ±S
# Tiles of s = ty·tx tokens, Ly×Lx of them (L = Ly·Lx); a strip is one row of tiles among a tile's neighbours
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..backends.interface import Case, Grid
from .interface import Algorithm, Call, Scaled, parts, row_top, weight

_LEAST, _LEAST_OF_SEQUENCE = 4, 64  # tokens along a tile: below this its products are too small to be worth a launch


class _Plan(NamedTuple):
    """How a grid is cut; sizes of the grid may be symbols, those of tiles are numbers."""

    grid: Grid
    tile: Grid
    reach: Grid  # neighbours on either side, in tiles
    causal: bool

    @staticmethod
    def of(grid: Grid, radius: Grid, causal: bool) -> '_Plan':
        sequence = isinstance(grid[0], int) and grid[0] == 1
        cuts = [_cut(r, s, _LEAST_OF_SEQUENCE if sequence else _LEAST) for r, s in zip(radius, grid)]
        (ty, ry), (tx, rx) = cuts
        return _Plan(grid, (ty, tx), (ry, rx), causal)

    @property
    def tiles(self) -> Grid:
        (height, width), (ty, tx) = self.grid, self.tile
        return parts(height, ty), parts(width, tx)

    @property
    def rows(self) -> range:
        """Rows of neighbours, in tiles."""
        return range(-self.reach[0], self.reach[0] + 1)

    @property
    def cols(self) -> range:
        return range(-self.reach[1], 1 if self.causal else self.reach[1] + 1)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """(B, K, N, C) -> (B, K, Ly, Lx, s·C), zeros beyond the grid."""
        (batch, heads, _, channels), (rows, cols), (ty, tx) = x.shape, self.tiles, self.tile
        below, right = rows * ty - self.grid[0], cols * tx - self.grid[1]
        x = F.pad(x.reshape(batch * heads, *self.grid, channels), (0, 0, 0, right, 0, below))
        x = x.reshape(batch * heads * rows, ty, cols, tx * channels).transpose(1, 2)
        return x.reshape(batch, heads, rows, cols, ty * tx * channels)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """(B, K, L, s, C) -> (B, K, N, C), the tokens of the grid."""
        (ty, tx), (row, col) = self.tile, (torch.arange(s, device=x.device) for s in self.grid)
        tile = (row // ty)[:, None] * self.tiles[1] + col // tx  # H, W
        place = tile * (ty * tx) + (row % ty)[:, None] * tx + col % tx
        # picked, not cut to size: a size that is a symbol may be that of whole tiles or not
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4]).index_select(2, place.flatten())

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """(B, K, Ly, Lx, s·C) -> (B, K, L, s, C)."""
        size = self.tile[0] * self.tile[1]
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], size, x.shape[4] // size)

    def strips(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """The neighbours of each tile, row by row: (B, K, L, keys, C) of (B, K, Ly, Lx, s·C)."""
        (rows, cols), (ry, rx) = x.shape[2:4], self.reach
        x = F.pad(x, (0, 0, rx, 0 if self.causal else rx, ry, ry))
        for y in range(len(self.rows)):
            tiles = [self.own(x[:, :, y : y + rows, i : i + cols]) for i in range(len(self.cols))]
            yield torch.cat(tiles, dim=3)

    def near_biases(self, bias: torch.Tensor, far: torch.Tensor) -> Iterator[torch.Tensor]:
        """The biases (K, s, keys) of each strip, the same for every tile; later keys of a causal sequence have -inf."""
        (ty, tx), (r, s) = self.tile, (bias.shape[1] // 2, bias.shape[2] // 2)
        of_y, of_x = (torch.arange(t, device=bias.device) for t in self.tile)
        col = torch.arange(self.cols.start, self.cols.stop, device=bias.device)
        dx = col[:, None] * tx + of_x - of_x[:, None, None]  # tx, cols, tx: key minus query
        for row in self.rows:
            dy = row * ty + of_y - of_y[:, None]  # ty, ty
            inside = (dy.abs() <= r)[:, None, None, :, None] & (dx.abs() <= s)[None, :, :, None, :]
            y, x = dy.clamp(-r, r) + r, dx.clamp(-s, s) + s
            index = y[:, None, None, :, None] * (2 * s + 1) + x[None, :, :, None, :]  # ty, tx, cols, ty, tx
            keys = len(self.cols) * ty * tx
            near = torch.where(inside.flatten(), bias.flatten(1)[:, index.flatten()], far[:, None])
            if self.causal:
                later = (dx > 0)[None, :, :, None, :].expand(ty, -1, -1, ty, -1)
                near = near.masked_fill(later.flatten(), -torch.inf)
            yield near.reshape(bias.shape[0], ty * tx, keys)

    def beyond(self, x: torch.Tensor) -> torch.Tensor:
        """For each tile the sum over all tiles but its neighbours, and over none that is later: (B, K, Ly, Lx, C)."""
        ry, rx = self.reach
        height = x.shape[2]
        around = F.pad(x, (0, 0, 0, 0, ry, ry))
        beside = sum(around[:, :, i : i + height] for i in range(2 * ry + 1))  # over the rows of neighbours
        total = _before(beside, 3, rx)
        if self.causal:
            return total
        total = total + _before(beside.flip(3), 3, rx).flip(3)
        rows = x.sum(3, keepdim=True)
        return total + _before(rows, 2, ry) + _before(rows.flip(2), 2, ry).flip(2)


def _sums(call: Call) -> Scaled:
    bias, grid, m = call.bias, call.grid, call.phi_q.shape[-1]
    assert bias is not None and bias.far is not None  # `_serves`
    plan = _Plan.of(grid, (bias.table.shape[1] // 2, bias.table.shape[2] // 2), call.causal)
    near = list(plan.near_biases(bias.table, bias.far))
    top = _top(call, plan, near)  # 1 or B, K, L, s
    keys, values = plan.cut(call.phi_k), plan.cut(call.v)
    queries = plan.own(plan.cut(call.phi_q))  # B, K, L, s, M
    states = plan.own(keys).transpose(-1, -2) @ plan.own(values)  # B, K, L, M, E
    (batch, heads, count), columns = states.shape[:3], states.shape[-1]
    far_states = plan.beyond(states.reshape(batch, heads, *plan.tiles, m * columns))
    out = queries @ far_states.reshape(batch, heads, count, m, columns)
    out = out * weight(bias.far[:, None, None], top)[..., None]
    for strip_bias, strip_keys, strip_values in zip(near, plan.strips(keys), plan.strips(values)):
        scores = queries @ strip_keys.transpose(-1, -2)  # B, K, L, s, keys
        out = out + (scores * weight(strip_bias[:, None], top[..., None])) @ strip_values
    return Scaled(plan.join(out), plan.join(top[..., None])[..., 0])


def _top(call: Call, plan: _Plan, near: list[torch.Tensor]) -> torch.Tensor:
    """The largest bias that each query sees, (1, K, L, s), or (B, K, L, s) with a mask."""
    assert call.bias is not None and call.bias.far is not None  # `_serves`
    mask, ones = call.key_mask, call.v.new_ones(1, 1, call.phi_k.shape[2], 1)
    tiles = plan.cut(ones if mask is None else mask.to(ones.dtype)[:, None, :, None])  # 1 or B, 1, Ly, Lx, s
    beyond = plan.beyond(tiles.sum(-1, keepdim=True)).flatten(2, 3)  # 1 or B, 1, L, 1
    top = torch.where(beyond > 0, call.bias.far.detach()[:, None, None], -torch.inf)  # 1 or B, K, L, 1
    for bias, keys in zip(near, plan.strips(tiles)):
        visible = torch.where(keys.transpose(-1, -2) > 0, bias.detach()[:, None], -torch.inf)  # B, K, L, s, keys
        top = torch.maximum(top, visible.amax(-1))
    others = None if call.others is None else call.others[..., None]  # K, 1, 1
    return row_top(top, others)


def _before(x: torch.Tensor, dim: int, reach: int) -> torch.Tensor:
    """Σ over l' < l - reach of x along a dimension of (B, K, Ly, Lx, C)."""
    size, ahead = x.shape[dim], reach + 1
    padding = (0, 0, ahead, 0) if dim == 3 else (0, 0, 0, 0, ahead, 0)
    return F.pad(x.cumsum(dim), padding).narrow(dim, 0, size)


def _cut(radius: int, size: int, least: int) -> Grid:
    """Tokens along a tile, and how many neighbours on either side the window reaches into."""
    if isinstance(size, int):
        radius = min(radius, size - 1)
        if size == 1:
            return 1, 0
    tile = max(least, -(-radius // 2))  # halves of the radius: 2.5 of it to a side, where whole ones make it 3
    return tile, -(-radius // tile)


def _serves(case: Case) -> bool:
    return case.radius is not None


def _cost(case: Case) -> float:
    assert case.radius is not None  # `_serves`
    plan = _Plan.of(case.grid, case.radius, case.causal)
    (rows, cols), (ty, tx) = plan.tiles, plan.tile
    keys = len(plan.rows) * len(plan.cols) * ty * tx
    return rows * ty * cols * tx * (keys * (case.m + case.d + 1.0) + 2 * case.m * (case.d + 1))


ALGORITHM = Algorithm('window', _serves, _cost, _sums)
