import pytest
import torch

from nprf_vit.ops import reference, toeplitz_matmul

from .compare import table_shape

SHAPES = [(None, n) for n in (1, 2, 5, 37, 257)] + [
    (grid, grid[0] * grid[1]) for grid in ((1, 1), (1, 5), (3, 2), (7, 14), (11, 13), (13, 1), (33, 35))
]
# float32 rounding grows with log n and is relative to the norm of the sum's terms
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def make_tables(grid_size, n, dtype=torch.float64, batch=2, heads=3, channels=4):
    generator = torch.Generator().manual_seed(n)
    table = torch.randn(heads, *table_shape(n, grid_size), generator=generator, dtype=torch.float64)
    x, g = torch.randn(2, batch, heads, n, channels, generator=generator, dtype=torch.float64)
    return [t.to(dtype).requires_grad_() for t in (table, x)] + [g.to(dtype)]


def assert_same(actual, expected, tol):
    assert actual.shape == expected.shape
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= tol, f'off by {error:.2e} of its norm, allowed {tol:.0e}'


def exact(table, x, g, grid_size):
    table, x = (t.detach().double().requires_grad_() for t in (table, x))
    y = reference.toeplitz_matmul(table, x, grid_size)
    return y, *torch.autograd.grad(y, (table, x), g.double())


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
@pytest.mark.parametrize(('grid_size', 'n'), SHAPES)
def test_product_and_gradients(grid_size, n, dtype):
    table, x, g = make_tables(grid_size, n, dtype)
    y = toeplitz_matmul(table, x, grid_size)
    assert y.dtype == dtype
    for actual, expected in zip((y, *torch.autograd.grad(y, (table, x), g)), exact(table, x, g, grid_size)):
        assert_same(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize('wrong', ['flipped', 'transposed', 'shifted', 'circular'])
def test_a_wrong_product_is_noticed(wrong):
    table, x, g = make_tables((7, 6), 42, torch.float32)
    y = exact(table, x, g, (7, 6))[0]
    mistaken, grid = table.detach(), (7, 6)
    if wrong == 'flipped':
        mistaken = mistaken.flip(-2, -1)
    elif wrong == 'transposed':
        mistaken, grid = mistaken.mT, (6, 7)
    elif wrong == 'shifted':
        mistaken = mistaken.roll(1, -1)
    else:  # what an FFT without padding would compute
        mistaken = mistaken.clone()
        mistaken[:, :6], mistaken[:, :, :5] = mistaken[:, 7:], mistaken[:, :, 6:]
    with pytest.raises(AssertionError, match='off by'):
        assert_same(toeplitz_matmul(mistaken.contiguous(), x, grid), y, TOLERANCE[torch.float32])


def test_non_contiguous_inputs():
    table, x, g = make_tables((3, 4), 12)
    expected = exact(table, x, g, (3, 4))[0]
    strided_x = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    strided_table = table.detach().mT.contiguous().mT
    assert not strided_x.is_contiguous()
    assert not strided_table.is_contiguous()
    assert_same(toeplitz_matmul(strided_table, strided_x, (3, 4)), expected, 1e-12)


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(half):
    table, x, g = make_tables((7, 14), 98, half)
    y = toeplitz_matmul(table, x, (7, 14))
    assert y.dtype == half
    expected = exact(table, x, g, (7, 14))[0]
    terms = reference.toeplitz_matmul(table.detach().double().abs(), x.detach().double().abs(), (7, 14))
    allowed = torch.finfo(half).eps / 2 * 1.01 * expected.abs() + 1e-6 * terms
    assert ((y.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize(
    ('table_size', 'x_size', 'grid_size', 'message'),
    [
        ((2, 9), (1, 2, 6, 3), None, r'\(2, 9\).*expected \(2, 11\)'),
        ((2, 5, 3), (1, 2, 6, 3), (2, 3), r'\(2, 5, 3\).*expected \(2, 3, 5\)'),
        ((3, 11), (1, 2, 6, 3), None, r'\(3, 11\).*expected \(2, 11\)'),
        ((2, 5, 3), (1, 2, 7, 3), (3, 2), r'3x2.*7 tokens'),
        ((2, 11), (2, 6, 3), None, r'\(2, 6, 3\)'),
    ],
)
def test_bad_shapes(table_size, x_size, grid_size, message):
    with pytest.raises(ValueError, match=message):
        toeplitz_matmul(torch.zeros(table_size), torch.zeros(x_size), grid_size)


def test_mixed_devices():
    with pytest.raises(ValueError, match='meta'):
        toeplitz_matmul(torch.zeros(2, 11, device='meta'), torch.zeros(1, 2, 6, 3))
