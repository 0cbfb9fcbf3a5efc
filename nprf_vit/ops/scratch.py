"""Working memory that is allocated once per call of an op and viewed in one shape after another."""

import functools
from collections.abc import Hashable, Sequence

import torch


@functools.cache
def keep_freed_pages() -> None:
    """Called by every CPU op, does something once per process.

    glibc returns freed pages to the kernel after every op until it has once seen a large block freed. At 14×14 tokens
    the page faults cost half as much as the attention; one block that is never touched ends them for the process.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device='cpu')


class Scratch:
    """Memory allocated once and viewed in each tile's shape: fresh pages cost as much as the arithmetic."""

    def __init__(self) -> None:
        self.memory: dict[Hashable, torch.Tensor] = {}
        self.shapes: dict[Hashable, Sequence[int]] = {}

    def buffer(self, key: Hashable, shape: Sequence[int], like: torch.Tensor, zero: bool = False) -> torch.Tensor:
        """Memory in the given shape; with `zero`, zeros but for what was written into it in the same shape."""
        size = torch.Size(shape).numel()
        if key not in self.memory or self.memory[key].numel() < size:
            self.memory[key] = torch.empty(size, dtype=like.dtype, device=like.device)
            self.shapes.pop(key, None)
        view = self.memory[key][:size].view(shape)
        if zero and self.shapes.get(key) != shape:
            view.zero_()
            self.shapes[key] = shape
        return view
