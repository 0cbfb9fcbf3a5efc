"""What the blocks of docs/layer.md leave behind, and the block of the first one at work."""

import torch

# ruff: noqa: F821  names of the page
assert step(x[:, 0]).shape == (2, 96) and out.shape == (2, 5, 96)
assert wide.shape == (2, 321, 96) and bias.table.shape == (3, 27, 27)
block = Block(16, 2, grid_size=(4, 4))
out = block(torch.randn(2, 6, 3, 16))
out.sum().backward()
assert out.shape == (2, 6, 3, 16)
assert block.attn.rel_pos_bias.table.grad.abs().sum() > 0
assert block.attn(torch.randn(10, 16, 16)).shape == (10, 16, 16)
