"""What the blocks of docs/masks.md leave behind."""

# ruff: noqa: F821  names of the page
assert loss.isfinite() and hidden.any() and seen.any()
assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
