"""What the block of docs/pixel.md leaves behind."""

# ruff: noqa: F821  names of the page
assert logits.shape == (2, 3072, 256)
assert tiny(torch.randint(17, (1, 1, 8, 8))).shape == (1, 64, 17)
