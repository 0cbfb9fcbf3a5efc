"""Relative position bias: one learned number per head and offset, on a grid or along a sequence.

K heads, N tokens, H×W grid (N = H·W); offsets are key minus query.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, trunc_normal_
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.utils import parametrize

from nprf_vit.ops.bias import AnyBias, Bias, DenseBias
from nprf_vit.ops.cell_grid import expand_cells
from nprf_vit.ops.checks import is_whole
from nprf_vit.ops.offsets import expand_table, extend_table

from .tracing import keep_whole

EXTEND = ('interpolate', 'extend', 'cells', 'clip')
REL_POS = ('shared', 'layer', 'none')


def check_rel_pos(rel_pos: str) -> None:
    """Raise for a choice of tables that does not exist."""
    if rel_pos not in REL_POS:
        raise ValueError(f'unknown rel_pos {rel_pos!r}: expected one of {", ".join(REL_POS)}')


def check_extend(extend: str) -> None:
    """Raise for a continuation that does not exist."""
    if extend not in EXTEND:
        raise ValueError(f'unknown rel_pos_extend {extend!r}: expected one of {", ".join(EXTEND)}')


def check_grid_size(grid_size: Sequence[int], name: str = 'grid_size') -> None:
    """Raise for what is neither a grid (H, W) nor a sequence (N,); `name` is what the caller's argument is called."""
    several = not isinstance(grid_size, int) and len(grid_size) in (1, 2) and all(is_whole(s) for s in grid_size)
    if not several or min(grid_size) < 1:
        hint = f', such as ({grid_size}, {grid_size}) or ({grid_size},)' if isinstance(grid_size, int) else ''
        raise ValueError(f'{name} {grid_size}: expected (H, W) or (N,), each at least 1{hint}')


def resize_table(table: torch.Tensor, grid_size: Sequence[int]) -> torch.Tensor:
    """Interpolate an offset table to another grid, as timm does for Swin (bicubic; linear along a sequence).

    Resizing to the table's own grid returns the same numbers: every sample falls on an entry.

    Args:
        table: (K, 2H'-1, 2W'-1) or (K, 2N'-1), zero offset at the centre.
        grid_size: (H, W) or (N,) to resize to.

    Returns:
        (K, 2H-1, 2W-1) or (K, 2N-1), in the table's dtype.
    """
    size = [2 * s - 1 for s in grid_size]
    mode = 'bicubic' if len(size) == 2 else 'linear'
    # in every forward, never kept: 1.6 ms for 12 heads and 64×64 tokens, and what is kept could be stale or be edited.
    # float32 at least: half-precision interpolation is not available everywhere
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    out = F.interpolate(wide.unsqueeze(0), size=size, mode=mode, align_corners=False)
    return out.squeeze(0).to(table.dtype)


def extend_window(window: torch.Tensor, far: torch.Tensor, grid_size: Sequence[int]) -> torch.Tensor:
    """The whole table of a grid from a window of it: `far` beyond the window, cropped where the grid is smaller.

    Args:
        window: (K, 2R+1, 2S+1) or (K, 2R+1), zero offset at the centre.
        far: (K,).
        grid_size: (H, W) or (N,).

    Returns:
        (K, 2H-1, 2W-1) or (K, 2N-1).
    """
    if len(grid_size) == 2:
        return extend_table(window, far, *grid_size)
    return extend_table(window.unsqueeze(1), far, 1, *grid_size).squeeze(1)


def clip_table(table: torch.Tensor, grid_size: Sequence[int]) -> torch.Tensor:
    """The whole table of a grid whose offsets are clipped to those of a table: beyond its ends come their values.

    Args:
        table: (K, 2H'-1, 2W'-1) or (K, 2N'-1), zero offset at the centre.
        grid_size: (H, W) or (N,); smaller ones crop the table.

    Returns:
        (K, 2H-1, 2W-1) or (K, 2N-1).
    """
    for dim, size in enumerate(grid_size, start=1):
        radius = table.shape[dim] // 2
        if isinstance(size, torch.SymInt):
            offset = torch.arange(2 * size - 1, device=table.device) - (size - 1)
            table = table.index_select(dim, offset.clamp(-radius, radius) + radius)
            continue
        more = size - 1 - radius
        if more <= 0:
            table = table.narrow(dim, -more, 2 * size - 1)
        else:  # repeated, not padded: the gradient of an end is then a sum, in the same order on every run
            first, last = (table.narrow(dim, i, 1) for i in (0, 2 * radius))
            shape = [more if i == dim else -1 for i in range(table.ndim)]
            table = torch.cat([first.expand(shape), table, last.expand(shape)], dim)
    return table


def _at_most(count: int, size: int) -> int:
    """min(count, size) of a size that may be a symbol: a number if all that it may be are as many as `count`."""
    if not isinstance(size, torch.SymInt):
        return min(count, size)
    return count if statically_known_true(size >= count) else torch.sym_min(count, size)


def border_mean(table: torch.Tensor) -> torch.Tensor:
    """Mean per head (K,) over the largest offsets of a table: its outermost ring, or its two ends."""
    ring = torch.ones_like(table[0])
    ring[(slice(1, -1),) * ring.ndim] = 0
    return (table * (ring / ring.sum())).flatten(1).sum(1)


def _parameter_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Where the parameter behind an attribute lies: in the module, or in the list of its parametrizations."""
    if not parametrize.is_parametrized(module, name):
        return module, name
    found = module.parametrizations[name]
    if not found.is_tensor:
        raise ValueError(f'{name} is parametrized by several tensors, which cannot be resized: remove that before')
    return found, 'original'


@register_notrace_module  # reads the grid as numbers, which fx does not have while tracing
class RelPosBias(nn.Module):
    """A table of relative position biases, and its continuation to other grids.

    'interpolate' stretches the table over the new grid's offsets. 'extend' keeps every learned offset and gives all
    larger ones a constant per head, so that attention costs O(N) by the `window` backend. The constant is stored as
    its distance `far` from the mean of the table's border: it starts there, whatever moved the border before it was
    first needed, and is trained from there. 'cells' lays the table's grid over the new one and gives two tokens the
    bias of the cells they lie in, at O(N) by the `cells` backend; where there are fewer tokens than cells along an
    axis, it interpolates to one cell per token. 'clip' gives offsets beyond the table the value at its end, on either
    side and along each axis, as T5 does; a causal sequence sees one end only, so attention is O(N) by `window`, all
    else pays for a whole table. On the table's own grid the four agree.

    Args:
        grid_size: (H, W) of the grid the table is learned on, or (N,) for a sequence.
        num_heads: Number of attention heads.
        dense: Return the gathered (K, N, N) bias that softmax attention adds to its scores instead of the table.
        extend: How to serve larger grids, 'interpolate', 'extend', 'cells' or 'clip'.

    Attributes:
        fixed_size: With 'cells' or 'extend', the size was asked for: a model that loads another table fits it to this.
    """

    def __init__(
        self,
        grid_size: Sequence[int],
        num_heads: int,
        dense: bool = False,
        extend: str = 'interpolate',
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_extend(extend)
        check_grid_size(grid_size)
        self.grid_size = tuple(grid_size)
        self.num_heads = num_heads
        self.dense = dense
        self.extend = extend
        self.fixed_size = False
        shape = [2 * s - 1 for s in self.grid_size]
        self.table = nn.Parameter(torch.empty(num_heads, *shape, device=device, dtype=dtype))
        far = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if extend == 'extend' else None
        self.register_parameter('far', far)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table from a truncated normal of standard deviation 0.02; what lies beyond is like its border."""
        trunc_normal_(self.table, std=0.02)
        if self.far is not None:
            nn.init.zeros_(self.far)

    @property
    def keeps_table(self) -> bool:
        """Whether a table of any size serves every grid as it is: as a window, or as the bias between its cells."""
        return self.extend != 'interpolate' and not self.fixed_size

    @torch.no_grad()
    def set_grid_size(self, grid_size: Sequence[int]) -> None:
        """Learn on another grid from here on: the table is resized once, if it is interpolated, or stays as it is."""
        grid_size = tuple(grid_size)
        if self.extend == 'interpolate' and grid_size != self.grid_size:
            owner, name = _parameter_of(self, 'table')
            table = getattr(owner, name)
            setattr(owner, name, nn.Parameter(resize_table(table, grid_size), requires_grad=table.requires_grad))
            self.grid_size = grid_size

    def fit_table(
        self, table: torch.Tensor, far: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Another grid's table, and with 'extend' its distance `far`, as this module can load them.

        With 'extend' the table is cropped to the window, or continued by its constant; that stays what it was, and
        without one it begins at the mean of the window's border. All else resizes the table.
        """
        if self.far is None:
            return resize_table(table, self.grid_size), None
        beyond = border_mean(table) + (0 if far is None else far)
        window = extend_window(table, beyond, self.grid_size)
        return window, torch.zeros_like(beyond) if far is None else beyond - border_mean(window)

    @keep_whole
    def forward(self, grid_size: Sequence[int] | None = None, causal: bool = False) -> AnyBias:
        """The bias on a grid, the table's own where none is given.

        Args:
            grid_size: (H, W) or (N,).
            causal: Whether keys after their query count for nothing; a clipped table is then a window.

        Returns:
            The table (K, 2H-1, 2W-1) or (K, 2N-1), with 'extend' as it was learned and with the bias (K,) of all
            offsets beyond it, with 'cells' that between cells; when dense, the matrix (K, N, N).
        """
        grid_size = self._check(grid_size)
        if self.extend == 'cells':
            bias = self._between_cells(grid_size)
        elif self.far is not None and not self.dense:
            bias = Bias(self.table, self.beyond())
        elif self.extend == 'clip' and causal and not self.dense and grid_size != self.grid_size:
            bias = Bias(self.table, self.table[:, 0])  # of all earlier keys; what comes after the query nobody sees
        else:
            bias = Bias(self.whole_table(grid_size))
        if not self.dense:
            return bias
        if bias.cells is not None:
            return DenseBias(expand_cells(bias.table, bias.cells, grid_size))
        return DenseBias(expand_table(bias.table, grid_size))

    def beyond(self) -> torch.Tensor:
        """With 'extend', the bias (K,) of the offsets beyond the table."""
        # in every forward, even on the table's own grid: its gradient is then zero, not missing, as DDP wants it
        return border_mean(self.table) + self.far

    def whole_table(self, grid_size: Sequence[int] | None = None) -> torch.Tensor:
        """The bias of every offset on a grid: (K, 2H-1, 2W-1) or (K, 2N-1)."""
        grid_size = self._check(grid_size)
        if self.extend == 'cells':
            bias = self._between_cells(grid_size)
            if bias.cells is not None:
                raise ValueError(f'a bias between {self.grid_size} cells is no table of the offsets of {grid_size}')
            return bias.table
        if self.far is not None:
            return extend_window(self.table, self.beyond(), grid_size)
        if self.extend == 'clip':
            return clip_table(self.table, grid_size)
        # a size that is symbolic while exporting is never compared: that would tie the graph to one answer
        symbolic = any(isinstance(s, torch.SymInt) for s in grid_size)
        return resize_table(self.table, grid_size) if symbolic or grid_size != self.grid_size else self.table

    def _between_cells(self, grid_size: tuple[int, ...]) -> Bias:
        """With 'cells', the bias between at most one cell per token; an ordinary table if there are as many."""
        # symbolic while exporting: compared to nothing, and resized to its own size where that changes no number
        symbolic = any(isinstance(s, torch.SymInt) for s in grid_size)
        cells = tuple(_at_most(*pair) for pair in zip(self.grid_size, grid_size))
        resized = any(isinstance(s, torch.SymInt) for s in cells) or cells != self.grid_size
        table = resize_table(self.table, cells) if resized else self.table
        return Bias(table) if not symbolic and cells == grid_size else Bias(table, cells=cells)

    def _check(self, grid_size: Sequence[int] | None) -> tuple[int, ...]:
        grid_size = self.grid_size if grid_size is None else tuple(grid_size)
        if len(grid_size) != len(self.grid_size):
            raise ValueError(f'a bias learned on the grid {self.grid_size} cannot serve a grid {grid_size}')
        return grid_size

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take a table of any size as it is if this one keeps it, and with 'extend' one without a constant beyond."""
        table = state_dict.get(prefix + 'table')
        if self.far is not None and table is not None:
            state_dict.setdefault(prefix + 'far', table.new_zeros(table.shape[0]))
        if self.keeps_table and table is not None:
            alike = table.ndim == self.table.ndim and table.shape[0] == self.num_heads
            if alike and table.shape != self.table.shape and all(s % 2 for s in table.shape[1:]):
                # the Parameter object stays, so an optimizer that holds it does too
                self.table.data = self.table.data.new_empty(table.shape)
                self.grid_size = tuple((s + 1) // 2 for s in table.shape[1:])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f'grid_size={self.grid_size}, num_heads={self.num_heads}, dense={self.dense}, extend={self.extend}'
