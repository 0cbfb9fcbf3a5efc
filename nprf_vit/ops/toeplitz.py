"""Toeplitz (1-D) and block-Toeplitz (2-D) products by FFT. docs/math.md, "Toeplitz products".

# K heads, N tokens, H×W grid (N = H·W), P×Q padded grid, Q' = Q/2+1, C channels
# A sequence is a 1×N grid: its transforms along y have length 1 and are left out.
# Spectra are (Q', P), frequencies along x first, so that both transforms run along contiguous memory.
"""

import torch

from .precision import without_autocast


def fast_length(n: int, even: bool = False) -> int:
    """Smallest length ≥ n whose prime factors are 2, 3 and 5 (and which is even, if asked for): FFTs are fast there."""
    while True:
        rest = n
        for p in (2, 3, 5):
            while rest % p == 0:
                rest //= p
        if rest == 1 and not (even and n % 2):
            return n
        n += 1


def padded_size(height: int, width: int) -> tuple[int, int]:
    """Sizes (P, Q) of the circular product that holds the linear one: at least 2H-1 and 2W-1."""
    return fast_length(2 * height - 1), fast_length(2 * width - 1, even=True) if width > 1 else 1


def forward_transform(x: torch.Tensor, padded: tuple[int, int]) -> torch.Tensor:
    """(..., H, W) real -> (..., Q', P) complex, transforming only the H rows that are not padding along x."""
    x = torch.fft.rfft(x, n=padded[1], dim=-1).transpose(-1, -2)  # ..., Q', H
    if padded[0] == 1:
        return x
    return torch.fft.fft(torch.nn.functional.pad(x, (0, padded[0] - x.shape[-1])), dim=-1)  # ..., Q', P


def inverse_transform(f: torch.Tensor, padded: tuple[int, int], height: int, width: int) -> torch.Tensor:
    """(..., Q', P) complex -> (..., H, W) real, the upper left corner, leaving out the rows below it along x."""
    if padded[0] > 1:
        f = torch.fft.ifft(f, dim=-1)[..., :height]  # ..., Q', H
    return torch.fft.irfft(f.transpose(-1, -2), n=padded[1], dim=-1)[..., :width]


def spectrum(table: torch.Tensor, padded: tuple[int, int]) -> torch.Tensor:
    """Spectrum (..., Q', P) of the product with table (..., 2H-1, 2W-1), table[dy+H-1, dx+W-1], (dy, dx) = key - query.

    The product is a correlation, y_i = Σ_j t_{j-i} x_j: a circular convolution with the table at -δ modulo (P, Q).
    """
    rows, cols = (table.shape[-2] + 1) // 2, (table.shape[-1] + 1) // 2
    kernel = table.new_zeros(*table.shape[:-2], *padded)
    flipped = table.flip(-2, -1)  # offset -δ at index δ+H-1
    kernel[..., : 2 * rows - 1, : 2 * cols - 1] = flipped
    kernel = kernel.roll((-(rows - 1), -(cols - 1)), dims=(-2, -1))
    f = torch.fft.rfft(kernel, dim=-1).transpose(-1, -2).contiguous()  # ..., Q', P
    return torch.fft.fft(f, dim=-1) if padded[0] > 1 else f


def table_from_spectrum(f: torch.Tensor, padded: tuple[int, int], height: int, width: int) -> torch.Tensor:
    """Correlations Σ_i g_i x_{i+δ} as a table (..., 2H-1, 2W-1), from their cross-spectrum conj(F(g))·F(x)."""
    if padded[0] > 1:
        f = torch.fft.ifft(f, dim=-1)
    kernel = torch.fft.irfft(f.transpose(-1, -2), n=padded[1], dim=-1)  # ..., P, Q at δ modulo (P, Q)
    kernel = kernel.roll((height - 1, width - 1), dims=(-2, -1))
    return kernel[..., : 2 * height - 1, : 2 * width - 1]


def toeplitz_matmul(table: torch.Tensor, x: torch.Tensor, grid_size: tuple[int, int] | None = None) -> torch.Tensor:
    """Multiplies by the (block-)Toeplitz matrix of an offset table, y_i = Σ_j table[j-i] x_j: O(N log N) per channel.

    Args:
        table: (K, 2N-1) with table[h, j-i+N-1], or (K, 2H-1, 2W-1) with table[h, dy+H-1, dx+W-1], key minus query.
        x: (B, K, N, C).
        grid_size: (H, W) with H·W = N, or None for a sequence.

    Returns:
        (B, K, N, C) in x's dtype; the transforms run in float32 (float64 stays float64).
    """
    heads, n, channels = _check(table, x, grid_size)
    height, width = grid_size or (1, n)
    dtype = torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x):
        table = table.to(dtype).view(heads, 2 * height - 1, 2 * width - 1)
        padded = padded_size(height, width)
        grid = x.to(dtype).transpose(-1, -2).unflatten(-1, (height, width))  # B, K, C, H, W
        f = forward_transform(grid, padded) * spectrum(table, padded).unsqueeze(1)  # B, K, C, Q', P
        y = inverse_transform(f, padded, height, width)  # B, K, C, H, W
        return y.flatten(-2).transpose(-1, -2).to(x.dtype)


def _check(table: torch.Tensor, x: torch.Tensor, grid_size: tuple[int, int] | None) -> tuple[int, int, int]:
    if x.dim() != 4:
        raise ValueError(f'x must be (B, heads, N, C), got {tuple(x.shape)}')
    heads, n, channels = x.shape[1:]
    if grid_size is not None and grid_size[0] * grid_size[1] != n:
        raise ValueError(f'grid {grid_size[0]}x{grid_size[1]} does not hold the {n} tokens of x {tuple(x.shape)}')
    expected = (heads, 2 * n - 1) if grid_size is None else (heads, 2 * grid_size[0] - 1, 2 * grid_size[1] - 1)
    if tuple(table.shape) != expected:
        raise ValueError(f'table {tuple(table.shape)} does not fit x {tuple(x.shape)}: expected {expected}')
    if table.device != x.device:
        raise ValueError(f'table is on {table.device}, x on {x.device}: expected one device')
    return heads, n, channels
