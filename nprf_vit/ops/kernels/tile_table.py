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


# kernel: half-precision values, D ≤ 64 and D ≤ 128; float32 values, D ≤ 64 and D ≤ 128. The largest tile of those tried
# that spills nothing on sm_80 and sm_90 for 32, 64 and 256 features. Above each row the registers per thread on sm_80
# with 32 features, of 255 that there are (`python -m nprf_vit.doctor --targets sm_80` has all). A window, or no bias at
# all, has rows of its own.
TABLE: dict[str, tuple[Tile, Tile, Tile, Tile]] = {
    # 64, 112, 149, 200; 64 features at a time spill 8 bytes at D = 128, 104 in float32
    'prepare': (Tile(32, 0, 64, 4), Tile(32, 0, 32, 4), Tile(32, 0, 64, 4), Tile(32, 0, 32, 4)),
    # 218, 168, 210, 168; 64 tokens spill 392 bytes with 256 features, 32 tokens 360 at D = 128
    'feature_map': (Tile(32, 0, 64, 4), Tile(16, 0, 32, 4), Tile(32, 0, 64, 4), Tile(16, 0, 32, 4)),
    # 166, 167, 168, 166; 64 tokens spill 8 bytes, 32 tokens 8 at D = 128
    'feature_map_gradient': (Tile(32, 0, 64, 4), Tile(16, 0, 32, 4), Tile(32, 0, 32, 4), Tile(16, 0, 32, 4)),
    # 190, 228, 255, 244; 4 warps instead of 8 spill 8 bytes
    'attention_forward': (Tile(64, 32, 64, 8), Tile(64, 32, 32, 8), Tile(64, 32, 32, 8), Tile(64, 16, 32, 8)),
    # 184, 247, 251, at most 250; 32 keys instead of 16 spill 16 bytes, 56 in float32; at D = 128 there 16 queries with
    # 4 warps spill 8 bytes in a causal window, and 16 without a bias on sm_90
    'attention_forward, window': (Tile(64, 16, 32, 8), Tile(64, 32, 32, 8), Tile(64, 16, 32, 8), Tile(32, 16, 32, 8)),
    # 128, 166, 167, 236
    'gradient_state': (Tile(32, 0, 64, 4), Tile(32, 0, 64, 4), Tile(32, 0, 64, 4), Tile(32, 0, 32, 4)),
    # 128, 142, 168, 254; in float32, 32 others spill 8 bytes at D = 32 with 16 features, 64 rows 24 at D = 128 on sm_90
    'feature_gradient': (Tile(64, 32, 64, 4), Tile(64, 32, 64, 4), Tile(64, 16, 32, 4), Tile(32, 16, 32, 8)),
    # 195, 225, 255, 190; float32 and D = 128 with 32 rows spill 648 bytes
    'feature_gradient, window': (Tile(64, 32, 64, 4), Tile(64, 32, 32, 8), Tile(64, 32, 32, 4), Tile(16, 16, 32, 4)),
    # 32 keys instead of 16 spill 8 bytes in float32
    'feature_gradient, causal window': (
        Tile(64, 32, 64, 4),
        Tile(64, 32, 32, 8),
        Tile(64, 16, 32, 4),
        Tile(16, 16, 32, 4),
    ),
    # 148, 128, 168, 228; 64 features at a time spill 40 bytes with 256
    'value_gradient': (Tile(64, 32, 32, 8), Tile(64, 32, 64, 8), Tile(64, 32, 32, 4), Tile(64, 16, 32, 8)),
    # 235, 214, 255, 212
    'value_gradient, window': (Tile(64, 16, 32, 8), Tile(64, 32, 64, 8), Tile(64, 32, 32, 4), Tile(64, 16, 32, 8)),
    # in float32, 16 queries instead of 32 spill 16 bytes with 16 features
    'value_gradient, causal window': (
        Tile(64, 16, 32, 8),
        Tile(64, 32, 64, 8),
        Tile(64, 32, 32, 4),
        Tile(64, 16, 32, 8),
    ),
    # 168, 140, 252, 192; float32 with 32 columns spills 168 bytes on sm_90
    'bias_gradient_parts': (Tile(32, 8, 64, 4), Tile(32, 8, 64, 4), Tile(16, 8, 32, 4), Tile(16, 8, 32, 4)),
}
# The same four columns where head dims up to 32 or up to 16 features make blocks small, None where TABLE's tile serves
# them too. Smaller blocks may spill where large ones do not, at 128 or 168 registers per thread: the compiler seems to
# aim at as many as let one more program fit on a multiprocessor.
SMALL: dict[str, tuple[Tile | None, Tile | None, Tile | None, Tile | None]] = {
    'feature_map_gradient': (Tile(32, 0, 32, 4), None, None, None),
    'attention_forward': (None, None, Tile(64, 16, 32, 8), None),
    'attention_forward, window': (Tile(64, 16, 32, 4), None, None, None),
    # 32 tokens spill 8 bytes at D = 32 on sm_90, 64 tokens 16
    'gradient_state': (None, None, Tile(16, 0, 32, 4), None),
    'feature_gradient': (None, None, None, Tile(32, 16, 32, 4)),
    'feature_gradient, window': (Tile(64, 16, 64, 4), None, Tile(64, 16, 32, 4), None),
    'value_gradient': (Tile(64, 32, 32, 4), None, Tile(64, 16, 32, 4), None),
    'value_gradient, window': (Tile(64, 16, 32, 4), None, Tile(64, 16, 32, 4), None),
    'value_gradient, causal window': (Tile(64, 16, 32, 4), None, None, None),
    # 2 or 4 diagonals at a time spill 8 bytes on sm_90, in float32 4 and 8
    'bias_gradient_parts': (Tile(32, 16, 64, 4), None, Tile(16, 2, 32, 4), None),
}
# Rows and columns of a tile of a window: nearly square for the tile itself, which keeps its surroundings small, and
# whole runs of 16 tokens in memory for those it walks over.
_OWN = {16: (4, 4), 32: (4, 8), 64: (8, 8)}
_OTHER = {16: (1, 16), 32: (2, 16), 64: (4, 16)}


def tile_for(kernel: str, v: torch.Tensor, m: int, p: Problem | None = None) -> Tile:
    """The tile for values (or queries) of this dtype and head dim, and m features."""
    if p is not None and p.bias != 'full':
        names = [f'{kernel}, window', kernel]
        if p.causal:
            names.insert(0, f'{kernel}, causal window')
        kernel = next(name for name in names if name in TABLE)
    d = v.shape[-1]
    column = 2 * (v.dtype == torch.float32) + (d > 64)
    small = SMALL[kernel][column] if kernel in SMALL and (d <= 32 or m <= 16) else None
    return small or TABLE[kernel][column]


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
