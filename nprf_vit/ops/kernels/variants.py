"""Every kind of launch that `auto` may come to, recorded on the meta device: what is compiled for a named GPU.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .launch import Launch, Problem, recorded
from .launch_backward import run_backward
from .launch_features import run_features, run_features_backward
from .launch_forward import run_forward


class Variant(NamedTuple):
    """A layer: the values' dtype, features, head dim, and its bias."""

    bias: str  # 'full', 'window', 'causal', 'causal window' or 'none'
    dtype: torch.dtype
    m: int
    d: int

    def __str__(self) -> str:
        return f'{self.bias}, {str(self.dtype)[6:]}, {self.m} features, head dim {self.d}'


_SHAPES = {'full': (14, 14), 'window': (64, 64), 'causal': (1, 3072), 'causal window': (1, 3072), 'none': (14, 14)}
_RADIUS, _CAUSAL_RADIUS = 13, 200  # of the window
# The paper's layer under autocast, and a window in float32.
FEW = (Variant('full', torch.bfloat16, 32, 64), Variant('window', torch.float32, 32, 64))


def variants() -> Iterator[Variant]:
    """Layers with blocks of every size: powers of two from 16 on, of head dims up to 128 and of features up to a chunk.

    256 features come in several chunks. Left out are small head dims with 64 features, beside 256 in chunks of up to
    64, and small blocks in float16, beside bfloat16.
    """
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    large = itertools.product((bfloat16, float16, float32), (32, 64, 256), (64, 128))
    few_features = itertools.product((bfloat16, float32), (16,), (64, 128))
    small_heads = itertools.product((bfloat16, float32), (16, 32, 256), (16, 32))
    for dtype, m, d in (*large, *few_features, *small_heads):
        for bias in _SHAPES:
            yield Variant(bias, dtype, m, d)


def launches_of(
    variant: Variant, batch: int = 8, heads: int = 12, grid: tuple[int, int] | None = None
) -> tuple[list[Launch], list[Launch]]:
    """Launches of a layer forward and backward, from a packed projection, on a grid or one that is usual for it."""
    bias, dtype, m, d = variant
    grid, causal = grid or _SHAPES[bias], bias.startswith('causal')
    kind = {'causal': 'full', 'causal window': 'window'}.get(bias, bias)
    n = grid[0] * grid[1]
    precision = 'tf32x3' if dtype == torch.float32 else 'tf32'
    radii = {'window': (_RADIUS, _RADIUS), 'causal window': (0, _CAUSAL_RADIUS), 'none': (0, 0)}
    radius = radii.get(bias, (grid[0] - 1, grid[1] - 1))
    linear = bias in ('window', 'none')
    problem = Problem(grid, kind, radius, causal, True, precision, int(linear))
    with torch.device('meta'), recorded() as launches:
        qkv, d_qkv = (torch.empty(batch, n, 3, heads, d, dtype=dtype) for _ in range(2))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        d_q, d_k, d_v = d_qkv.permute(2, 0, 3, 1, 4).unbind(0)
        z, g = (torch.empty(batch, n, heads, d, dtype=dtype).transpose(1, 2) for _ in range(2))
        w = torch.empty(heads, m, d)
        table = None if bias == 'none' else torch.empty(heads, 2 * radius[0] + 1, 2 * radius[1] + 1)
        far = torch.empty(heads) if kind == 'window' else None
        phi_q, phi_k = run_features(q, k, w, 'tf32x3')
        forward = run_forward(phi_q, phi_k, v, table, far, problem, z)
        count = len(launches)
        d_phi_q, d_phi_k, _, _ = run_backward(phi_q, phi_k, v, table, far, problem, forward, g, d_v, True)
        run_features_backward(q, k, w, phi_q, phi_k, d_phi_q, d_phi_k, d_q, d_k, 'tf32x3')
    return launches[:count], launches[count:]
