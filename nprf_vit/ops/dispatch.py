"""Which backend is cheapest: counts of operations, a function of shapes only, the same on every run.

# K heads, N tokens, M features, D head dim, H×W grid; a sequence is a 1×N grid
"""

import math

from . import toeplitz
from .backends import fft, fused_support, window

# Cost of one point of one channel of an FFT, per log2 of its size, in multiply-adds of `direct`, on two CPU cores:
# 8 to 9.7 for sizes that are powers of two, but for a factor 3 (`python -m benchmarks.attention --constants`), 12 to 13
# for others and for sequences (`nprf_vit.doctor`, benchmarks.length). The geometric mean of 8.5 and 13, so that either
# is at most 1.25 times off. Other devices use the same constant until measured there.
FFT_POINT = 10.5


def choose_backend(
    grid: tuple[int, int],
    m: int,
    d: int,
    causal: bool,
    has_bias: bool,
    radius: tuple[int, int] | None = None,
    device: str = 'cpu',
) -> str:
    """The cheapest backend.

    direct: N²(M+D+1) multiply-adds, half of them when causal. fft: M(D+1) channels of a P×Q transform pair, or for
    causal sequences one such pair of half the length per level plus the dense blocks. window: `window.cost` per token.

    Args:
        grid: (H, W), or (1, N) for a sequence.
        m: Features.
        d: Head dim.
        causal: Whether later keys are left out.
        has_bias: Whether there is a bias.
        radius: (R, S) of a bias that is constant beyond it, if it is.
        device: Device type. On 'cuda' the kernels of `fused` do what `direct`, `window` and, without a bias, `linear`
            would; n² on tensor cores is ahead of cuFFT on M(D+1) channels far beyond 10⁴ tokens (docs/backends.md).
    """
    if device == 'cuda' and (has_bias or not causal) and fused_support.why_not_sizes(m, d) is None:
        return 'fused'
    if not has_bias:
        return 'linear'
    costs = count(grid, m, d, causal, radius)
    return min(costs, key=costs.get)


def count(
    grid: tuple[int, int], m: int, d: int, causal: bool = False, radius: tuple[int, int] | None = None
) -> dict[str, float]:
    """Cost of each backend that serves a bias, in multiply-adds of `direct`; `window` only if there is a radius."""
    costs = {'direct': _direct(grid, m, d, causal), 'fft': _fft(grid, m, d, causal)}
    if radius is not None:
        radius = tuple(min(r, s - 1) for r, s in zip(radius, grid))
        costs['window'] = grid[0] * grid[1] * window.cost(radius, m, d)
    return costs


def fitted_fft_point(grid: tuple[int, int], m: int, d: int, fft_seconds: float, direct_seconds: float) -> float:
    """The FFT_POINT with which the model has the ratio of fft to direct that was measured."""
    costs = count(grid, m, d)
    return FFT_POINT * (fft_seconds / direct_seconds) / (costs['fft'] / costs['direct'])


def _direct(grid, m, d, causal):
    return (grid[0] * grid[1]) ** 2 * (m + d + 1) * (0.5 if causal else 1.0)


def _fft(grid, m, d, causal):
    channels, n = m * (d + 1), grid[0] * grid[1]
    if causal:
        levels = max(0, math.ceil(math.log2(max(1, n / fft.CAUSAL_BLOCK))))
        points = sum(n * math.log2(2 * fft.CAUSAL_BLOCK << i) for i in range(levels))
        return FFT_POINT * channels * points + n * fft.CAUSAL_BLOCK * (m + d + 1) * 0.5
    padded = toeplitz.padded_size(*grid)
    points = padded[0] * padded[1]
    return FFT_POINT * channels * points * math.log2(max(2, points))
