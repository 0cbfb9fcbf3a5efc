"""What the blocks of the README leave behind."""

# ruff: noqa: F821  names of the page
assert logits.shape == (1, 10) and z.shape == (1, 12, 32 * 24, 64)
