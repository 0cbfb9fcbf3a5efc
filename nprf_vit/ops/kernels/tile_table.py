"""Tile sizes of every kernel."""

from typing import NamedTuple

import torch

from .launch import Problem


class Tile(NamedTuple):
    """What a program holds."""

    own: int  # tokens of its tile
    other: int  # tokens of a tile that it walks over; diagonals at a time in bias_gradient_parts
    features: int  # of a chunk, at most
    warps: int


# kernel: half-precision values, D ≤ 64 and D ≤ 128; float32 values, D ≤ 64 and D ≤ 128
TABLE: dict[str, tuple[Tile, Tile, Tile, Tile]] = {
    'prepare': (Tile(32, 0, 64, 4),) * 4,
    'feature_map': (Tile(32, 0, 64, 4),) * 4,
    'feature_map_gradient': (Tile(32, 0, 64, 4),) * 4,
    'attention_forward': (Tile(64, 32, 64, 8),) * 4,
    'attention_forward, window': (Tile(64, 32, 64, 8),) * 4,
    'gradient_state': (Tile(32, 0, 64, 4),) * 4,
    'feature_gradient': (Tile(64, 32, 64, 4),) * 4,
    'feature_gradient, window': (Tile(64, 32, 64, 4),) * 4,
    'value_gradient': (Tile(64, 32, 64, 4),) * 4,
    'value_gradient, window': (Tile(64, 32, 64, 4),) * 4,
    'bias_gradient_parts': (Tile(32, 8, 64, 4),) * 4,
}
# Rows and columns of a tile of a window: nearly square for the tile itself, which keeps its surroundings small, and
# whole runs of 16 tokens in memory for those it walks over.
_OWN = {16: (4, 4), 32: (4, 8), 64: (8, 8)}
_OTHER = {16: (1, 16), 32: (2, 16), 64: (4, 16)}


def tile_for(kernel: str, v: torch.Tensor, p: Problem | None = None) -> Tile:
    """The tile for values (or queries) of this dtype and head dim."""
    if p is not None and is_local(p) and f'{kernel}, window' in TABLE:
        kernel = f'{kernel}, window'
    return TABLE[kernel][2 * (v.dtype == torch.float32) + (v.shape[-1] > 64)]


def is_local(p: Problem) -> bool:
    """Whether tiles are patches of the grid; a causal window has no linear term, and walks over all earlier keys."""
    return p.bias == 'window' and not p.causal


def patches(tile: Tile, p: Problem) -> tuple[int, int, int, int]:
    """Rows and columns of a tile and of those that it walks over."""
    if not is_local(p) or p.grid[0] == 1:
        return 1, tile.own, 1, tile.other
    return *_OWN[tile.own], *_OTHER[tile.other]


def tile_count(p: Problem, rows: int, cols: int) -> int:
    height, width = p.grid
    if not is_local(p):
        return -(-height * width // (rows * cols))
    return -(-height // rows) * -(-width // cols)
