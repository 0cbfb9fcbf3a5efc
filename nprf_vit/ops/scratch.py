"""Working memory that is allocated once per call of an op and viewed in one shape after another."""

import torch


class Scratch:
    """Memory allocated once and viewed in each tile's shape: fresh pages cost as much as the arithmetic."""

    def __init__(self):
        self.memory, self.shapes = {}, {}

    def buffer(self, key, shape, like, zero=False):
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
