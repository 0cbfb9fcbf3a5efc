"""What the blocks of docs/high_resolution.md leave behind."""

# ruff: noqa: F821  names of the page
assert [m.shape[-2:] for m in maps] == 3 * [(32, 48)]
