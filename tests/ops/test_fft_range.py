"""The range of biases that `fft` serves by itself, and the bound behind it (docs/math.md, "FFT")."""

import math

import pytest
import torch

from nprf_vit.ops import kernel_attention, reference, toeplitz
from nprf_vit.ops.backends import fft

GRIDS = [(1, 64), (1, 257), (14, 14), (31, 33), (1, 3072)]


def random_table(grid, std, heads=2, seed=0):
    shape = (heads, 2 * grid[0] - 1, 2 * grid[1] - 1)
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize('grid', GRIDS)
@pytest.mark.parametrize('source', ['normal', 'one-hot', 'heavy tail'])
def test_rounding_of_one_product_stays_below_the_assumed_constant(grid, source):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, *grid, generator=generator)
    if source == 'one-hot':
        x = torch.zeros(8, *grid)
        x.flatten(1)[torch.arange(8), torch.randint(grid[0] * grid[1], (8,), generator=generator)] = 1
    elif source == 'heavy tail':
        x = x.abs() ** 8
    padded = toeplitz.padded_size(*grid)

    def product(c, x):
        f = toeplitz.forward_transform(x, padded) * toeplitz.spectrum(c, padded)
        return toeplitz.inverse_transform(f, padded, *grid)

    for std in (0.5, 3.0):
        c = random_table(grid, std, heads=1).exp().float()
        exact = product(c.double(), x.double())
        size = c.double().norm() * x.double().flatten(1).norm(dim=1)
        units = ((product(c, x) - exact).abs().amax((-1, -2)) / size).max() / 2**-24
        assert units <= fft._ROUNDING * math.log2(2 * c.numel())


def test_which_dtype_serves_which_bias():
    grid = (32, 32)
    assert fft.working_dtype(random_table(grid, 0.02).float(), False, torch.float32) == torch.float32
    assert fft.working_dtype(random_table(grid, 2.0).float(), False, torch.float32) == torch.float64
    assert fft.working_dtype(random_table(grid, 8.0).float(), False, torch.float32) is None
    assert fft.working_dtype(random_table(grid, 0.02), False, torch.float64) == torch.float64
    assert fft.working_dtype(random_table(grid, 5.0), False, torch.float64) is None


def widest_float32_table(grid, causal):
    """A table scaled up to the edge of what float32 serves."""
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        served = fft.working_dtype(random_table(grid, middle).float(), causal, torch.float32) == torch.float32
        low, high = (middle, high) if served else (low, middle)
    return random_table(grid, low).float()


@pytest.mark.parametrize(('grid', 'causal'), [((9, 31), False), ((1, 700), False), ((1, 1500), True)])
def test_the_tolerance_holds_at_the_edge_of_float32_for_the_worst_values(grid, causal):
    bias = widest_float32_table(grid, causal)
    n = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(2)
    phi_q, phi_k = (torch.rand(1, 2, n, 4, generator=generator) for _ in range(2))
    # one-hot columns: each output element is a single weight a_ij, and must be right relative to itself
    tokens = torch.randint(n, (6,), generator=generator)
    v = torch.zeros(1, 2, n, 6)
    v[:, :, tokens, torch.arange(6)] = 1
    grid_size = None if grid[0] == 1 else grid
    table = bias[:, 0] if grid_size is None else bias
    z = kernel_attention(phi_q, phi_k, v, table, grid_size=grid_size, causal=causal, backend='fft')
    exact = [x.double() for x in (phi_q, phi_k, v, table)]
    expected = reference.attention(*exact, grid_size=grid_size, causal=causal)
    seen = expected > 0
    assert ((z - expected).abs()[seen] / expected[seen]).max() <= 1e-3
    assert z[~seen].eq(0).all() or not causal


def test_small_lengths_round_most():
    worst = 0.0
    for n in (2, 3, 4, 8, 16):
        padded = toeplitz.padded_size(1, n)
        x = torch.randn(4000, 1, n, generator=torch.Generator().manual_seed(n))
        c = torch.randn(4000, 1, 2 * n - 1, generator=torch.Generator().manual_seed(n + 1)).mul(2).exp()

        def product(c, x, n=n, padded=padded):
            f = toeplitz.forward_transform(x, padded) * toeplitz.spectrum(c, padded)
            return toeplitz.inverse_transform(f, padded, 1, n)

        error = (product(c, x) - product(c.double(), x.double())).abs().amax((-1, -2))
        size = c.double().flatten(1).norm(dim=1) * x.double().flatten(1).norm(dim=1)
        worst = max(worst, ((error / size).max() / 2**-24 / math.log2(2 * (2 * n - 1))).item())
    assert 0.2 < worst <= fft._ROUNDING
