"""Relative position bias: one learned number per head and offset, on a grid or along a sequence.

K heads, N tokens, H×W grid (N = H·W); offsets are key minus query.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, trunc_normal_
from torch import nn


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
    # float32: half-precision interpolation is not available everywhere, and this runs once per grid
    out = F.interpolate(table.float().unsqueeze(0), size=size, mode=mode, align_corners=False)
    return out.squeeze(0).to(table.dtype)


def expand_table(table: torch.Tensor, grid_size: Sequence[int]) -> torch.Tensor:
    """Gather the dense bias B[k, i, j] = table[k, offset of key j from query i]; O(N²) memory.

    Args:
        table: (K, 2H-1, 2W-1) or (K, 2N-1).
        grid_size: (H, W) or (N,).

    Returns:
        (K, N, N).
    """
    offsets = []
    for s in grid_size:
        pos = torch.arange(s, device=table.device)
        offsets.append(pos[None, :] - pos[:, None] + (s - 1))  # s queries, s keys
    if len(offsets) == 1:
        return table[:, offsets[0]]  # K, N, N
    y, x = offsets
    index = y[:, None, :, None] * (2 * grid_size[1] - 1) + x[None, :, None, :]  # H, W, H, W
    n = grid_size[0] * grid_size[1]
    return table.flatten(1)[:, index.reshape(n, n)]  # K, N, N


@register_notrace_module  # compares values, which fx does not have while tracing
class GridCache(nn.Module):
    """A resize function that keeps its results between forwards without gradient, per grid.

    A result is used again only while the tensor it was made from has the same values, so a training step, a loaded
    checkpoint or a write through `.data` never leaves a stale copy behind. The comparison reads a table of a few
    thousand numbers; on a GPU it costs one synchronisation per forward.

    Args:
        resize: Called as resize(source, grid_size, *args).
        capacity: Grids to keep; the least recently used goes first.
    """

    def __init__(self, resize: Callable, capacity: int = 8) -> None:
        super().__init__()
        self.resize = resize
        self.capacity = capacity
        self.entries: OrderedDict = OrderedDict()

    def forward(self, source: torch.Tensor, grid_size: Sequence[int], *args) -> torch.Tensor:
        """Return `resize(source, grid_size, *args)`."""
        plain = type(source) in (torch.Tensor, nn.Parameter) and not source.is_meta
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not plain:
            return self.resize(source, grid_size, *args)
        key = (tuple(grid_size), args, source.device, source.dtype)
        entry = self.entries.get(key)
        if entry is None or entry[0].shape != source.shape or not torch.equal(entry[0], source):
            entry = (source.detach().clone(), self.resize(source, grid_size, *args))
            self.entries[key] = entry
            while len(self.entries) > self.capacity:
                self.entries.popitem(last=False)
        self.entries.move_to_end(key)
        return entry[1]

    def __getstate__(self) -> dict:
        return {**self.__dict__, 'entries': OrderedDict()}  # copies and pickles start empty


@register_notrace_module  # reads the grid as numbers, which fx does not have while tracing
class RelPosBias(nn.Module):
    """A table of relative position biases, and its continuation to other grids.

    Args:
        grid_size: (H, W) of the grid the table is learned on, or (N,) for a sequence.
        num_heads: Number of attention heads.
        dense: Return the gathered (K, N, N) bias that softmax attention adds to its scores instead of the table.
    """

    def __init__(
        self,
        grid_size: Sequence[int],
        num_heads: int,
        dense: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self.grid_size = tuple(grid_size)
        self.num_heads = num_heads
        self.dense = dense
        if len(self.grid_size) not in (1, 2):
            raise ValueError(f'grid_size {self.grid_size} has {len(self.grid_size)} numbers: expected (H, W) or (N,)')
        shape = [2 * s - 1 for s in self.grid_size]
        self.table = nn.Parameter(torch.empty(num_heads, *shape, device=device, dtype=dtype))
        self.resize = GridCache(resize_table)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table from a truncated normal of standard deviation 0.02."""
        trunc_normal_(self.table, std=0.02)

    @torch.no_grad()
    def set_grid_size(self, grid_size: Sequence[int]) -> None:
        """Learn on another grid from here on: the table is resized once, in place of the old one."""
        grid_size = tuple(grid_size)
        if grid_size != self.grid_size:
            self.table = nn.Parameter(resize_table(self.table, grid_size), requires_grad=self.table.requires_grad)
            self.grid_size = grid_size

    def forward(self, grid_size: Sequence[int] | None = None) -> torch.Tensor:
        """The bias on a grid, the table's own where none is given.

        Args:
            grid_size: (H, W) or (N,).

        Returns:
            (K, 2H-1, 2W-1) or (K, 2N-1); (K, N, N) when dense.
        """
        grid_size = self.grid_size if grid_size is None else tuple(grid_size)
        if len(grid_size) != len(self.grid_size):
            raise ValueError(f'a bias learned on the grid {self.grid_size} cannot serve a grid {grid_size}')
        table = self.table
        # a size that is symbolic while exporting is never compared: that would tie the graph to one answer
        symbolic = any(isinstance(s, torch.SymInt) for s in grid_size)
        if symbolic or grid_size != self.grid_size:
            table = self.resize(table, grid_size)
        return expand_table(table, grid_size) if self.dense else table

    def extra_repr(self) -> str:
        return f'grid_size={self.grid_size}, num_heads={self.num_heads}, dense={self.dense}'
