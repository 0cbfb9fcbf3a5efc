"""A bias between cells of tokens: two algorithms, each against the oracle, which gathers."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from nprf_vit.ops import choose_backend, kernel_attention, reference
from nprf_vit.ops.backends import batched
from nprf_vit.ops.backends import cells as cells_backend
from nprf_vit.ops.cell_grid import CellGrid, cell_of, first_token
from tests.fake_cuda import needs_fake_cuda

from .compare import FORWARD_TOLERANCE, assert_gradients, assert_output, check, gradients, make_case

BACKENDS = ['cells', 'direct']
# one cell, one per token, even, uneven along one axis or both, a row of cells
GRIDS = [
    ((1, 1), (1, 1)),
    ((1, 5), (1, 3)),
    ((3, 2), (2, 2)),
    ((3, 2), (3, 2)),
    ((3, 2), (1, 1)),
    ((7, 14), (7, 7)),
    ((7, 14), (3, 5)),
    ((7, 14), (1, 14)),
    ((11, 13), (5, 7)),
    ((13, 1), (4, 1)),
    ((12, 12), (4, 4)),
    ((15, 16), (14, 14)),
    ((33, 35), (3, 4)),
]
SEQUENCES = [(1, 1), (7, 3), (37, 37), (65, 8), (257, 100)]
DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])


@pytest.fixture
def by_fft(monkeypatch):
    """Products between cells by FFT, however few cells there are."""
    monkeypatch.setattr(cells_backend, '_spectral_cost', lambda cells: 0.0)


@DTYPES
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize(('grid', 'cells'), GRIDS, ids=str)
def test_grids(grid, cells, backend, dtype):
    check(make_case(grid_size=grid, cells=cells, dtype=dtype), backend)


@DTYPES
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize(('n', 'cells'), SEQUENCES)
def test_sequences(n, cells, backend, dtype):
    check(make_case(n, cells=cells, dtype=dtype), backend)


@DTYPES
@pytest.mark.parametrize('std', [0.1, 0.5, 3.0])
@pytest.mark.parametrize('shape', [{'grid_size': (11, 13), 'cells': (5, 7)}, {'n': 65, 'cells': 8}], ids=str)
def test_by_fft(shape, std, dtype, by_fft):
    """A small bias in float32, a larger one in float64 inside, beyond that dense."""
    check(make_case(**shape, std=std, dtype=dtype), 'cells')


@pytest.mark.parametrize('peak', [6.0, 15.0, 20.0, 25.0])
@pytest.mark.parametrize('shape', [{'grid_size': (11, 13), 'cells': (5, 7)}, {'n': 65, 'cells': 8}], ids=str)
def test_by_fft_under_a_peak(shape, peak, by_fft):
    """float64 inside, sums with the mean of c included: a row that does not see the peak is what is left of it."""
    case = make_case(**shape, std=0.1, dtype=torch.float32)
    case.bias.view(2, -1)[:, 0] = peak
    check(case, 'cells', names=['v', 'phi_q'])


@DTYPES
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('std', [20.0, 80.0, 750.0])
@pytest.mark.parametrize(('grid', 'cells'), [((11, 13), (5, 7)), ((12, 12), (4, 4)), ((1, 9), (1, 2))], ids=str)
def test_biases_of_any_size(grid, cells, std, backend, dtype):
    case = make_case(grid_size=grid, cells=cells, std=std, dtype=dtype)
    check(case, backend, names=['v'])
    masked = dataclasses.replace(case, bias=case.bias.masked_fill(case.bias < -std, -torch.inf))
    assert_output(masked.run(backend), masked, 1e-4)


@DTYPES
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('peak', [30.0, 88.0, 400.0, 750.0])
def test_a_peak_that_some_cells_do_not_see(peak, backend, dtype):
    """Cells at the border lack the offset with the largest bias: scaled by it, nothing would be left of their rows."""
    case = make_case(grid_size=(11, 13), cells=(5, 7), dtype=dtype)
    case.bias[:, 0, 0] += peak
    check(case, backend, names=['v', 'bias'])


@DTYPES
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('std', [1.0, 80.0, 750.0])
def test_cells_of_zero_keys_do_not_count_in_maxima(std, backend, dtype):
    case = make_case(grid_size=(9, 12), cells=(3, 4), std=std, dtype=dtype)
    keep = torch.arange(108).view(9, 12) % 12 < 5  # the right half of the cells has no key
    case.phi_k[0, :, ~keep.flatten()] = 0
    wide = case.map(lambda x: x.double())
    # in logarithms: the oracle's own maxima are over all keys
    logs = {'bias': wide.bias, 'grid_size': (9, 12), 'cells': (3, 4)}
    a = reference.log_attention_weights(wide.phi_q.log(), wide.phi_k.log(), **logs)
    error = (case.run(backend).double() - a @ wide.v).abs() / (a @ wide.v.abs())
    assert error.max() <= FORWARD_TOLERANCE[dtype]
    case.phi_k[1] = 0
    z = case.run(backend)
    assert not z[1].any() and z.isfinite().all()


@pytest.mark.parametrize('backend', BACKENDS)
def test_gradients_of_zero_keys_stay_finite(backend):
    case = make_case(grid_size=(6, 6), cells=(3, 3), std=300.0, dtype=torch.float32)
    case.phi_k[:, :, :18] = 0
    leaves = {name: x.requires_grad_() for name, x in case.tensors().items()}
    case.run(backend).sum().backward()
    for name, x in leaves.items():
        assert x.grad.isfinite().all(), name


@pytest.mark.parametrize('grid', [(1, 1), (7, 5), (12, 12)], ids=str)
def test_one_cell_is_linear(grid):
    case = make_case(grid_size=grid, cells=(1, 1))
    plain = dataclasses.replace(case, bias=None, cells=None)
    torch.testing.assert_close(case.run('cells'), plain.run('linear'))


@pytest.mark.parametrize('backend', ['auto', 'direct', 'fft'])
def test_one_token_per_cell_is_the_papers_model(backend):
    case = make_case(grid_size=(7, 5), cells=(7, 5), dtype=torch.float32)
    plain = dataclasses.replace(case, cells=None)
    assert torch.equal(case.run(backend), plain.run(backend))
    torch.testing.assert_close(case.run('cells'), plain.run('direct'))


@pytest.mark.parametrize(('grid', 'cells'), GRIDS, ids=str)
def test_tokens_come_back_from_their_cells(grid, cells):
    places = CellGrid(grid, cells, torch.device('cpu'))
    x = torch.randn(2, 3, grid[0] * grid[1], 4)
    inside = places.gather(x, zero=True)
    back = torch.full_like(x, torch.nan)
    places.scatter(inside, back)
    assert torch.equal(back, x)
    # a cell holds its own tokens and zeros
    cell = cell_of(grid[0], cells[0])[:, None] * cells[1] + cell_of(grid[1], cells[1])
    sums = torch.zeros(2, 3, cells[0] * cells[1], 4).index_add_(2, cell.flatten(), x)
    torch.testing.assert_close(inside.sum(1).view(3, -1, 2, 4), sums.permute(1, 2, 0, 3))


@pytest.mark.parametrize('size', range(1, 40))
def test_first_tokens_of_cells(size):
    for count in range(1, size + 1):
        cell = cell_of(size, count).tolist()
        assert [first_token(c, size, count) for c in range(count)] == [cell.index(c) for c in range(count)]
        sizes = [cell.count(c) for c in range(count)]
        assert min(sizes) >= size // count and max(sizes) <= -(-size // count)


@pytest.mark.parametrize('backend', BACKENDS)
def test_a_transposed_table_and_a_shifted_cell_are_noticed(backend):
    case = make_case(grid_size=(9, 9), cells=(4, 4))
    for wrong in (
        dataclasses.replace(case, bias=case.bias.transpose(1, 2)),
        dataclasses.replace(case, **{name: x.roll(1, 2) for name, x in case.tensors().items() if x.dim() == 4}),
    ):
        z = wrong.run(backend)
        z = z if wrong.v is case.v else z.roll(-1, 2)
        with pytest.raises(AssertionError, match='error'):
            assert_output(z, case, 1e-8)


@pytest.mark.parametrize('backend', BACKENDS)
def test_gradients_are_reproducible(backend):
    case = make_case(grid_size=(20, 21), cells=(6, 5), dtype=torch.float32)

    def run():
        leaves = {name: x.detach().clone().requires_grad_() for name, x in case.tensors().items()}
        z = dataclasses.replace(case, **leaves).run(backend)
        return z, *torch.autograd.grad(z.square().sum(), list(leaves.values()))

    for first, second in zip(run(), run()):
        assert torch.equal(first, second)


@pytest.mark.parametrize('backend', BACKENDS)
def test_a_constant_bias_equals_none(backend):
    case = make_case(grid_size=(9, 7), cells=(4, 3))
    plain = dataclasses.replace(case, bias=None, cells=None)
    constant = dataclasses.replace(case, bias=torch.full_like(case.bias, 3.0))
    torch.testing.assert_close(constant.run(backend), plain.run('linear'))


def test_blocks_of_rows_give_the_same(monkeypatch):
    from nprf_vit.ops import cell_weights

    case = make_case(grid_size=(15, 16), cells=(7, 5))
    whole = case.run('cells')
    monkeypatch.setattr(cell_weights, '_BLOCK', 200)  # two rows of cells at a time
    torch.testing.assert_close(case.run('cells'), whole)
    check(case, 'cells')


def test_the_cost_model():
    sizes = {'m': 32, 'd': 64, 'causal': False, 'has_bias': True}
    assert choose_backend((14, 14), cells=(14, 14), **sizes) == 'direct'
    assert choose_backend((20, 20), cells=(14, 14), **sizes) == 'direct'
    for side in (56, 64, 112, 128, 192):
        assert choose_backend((side, side), cells=(14, 14), **sizes) == 'cells'
    assert choose_backend((256, 256), cells=(256, 256), **sizes) == 'fft'
    # many cells: between them an FFT is cheaper than all pairs
    assert cells_backend._spectral_cost((14, 14)) > 196**2 and cells_backend._spectral_cost((64, 64)) < 4096**2


def test_errors_say_what_would_fit():
    case = make_case(grid_size=(9, 8), cells=(4, 3))
    arguments = case.arguments()
    with pytest.raises(ValueError, match=r'bias \(2, 7, 5\).*9x8.*\(2, 17, 15\)'):
        kernel_attention(**arguments | {'cells': None})
    with pytest.raises(ValueError, match=r'bias \(2, 7, 5\) does not fit 4x4 cells: expected \(2, 7, 7\)'):
        kernel_attention(**arguments | {'cells': (4, 4)})
    with pytest.raises(ValueError, match=r'cells \(10, 3\).*9x8 grid.*at most \(9, 8\)'):
        kernel_attention(**arguments | {'cells': (10, 3)})
    with pytest.raises(ValueError, match=r'cells 4.*expected \(h, w\)'):
        kernel_attention(**arguments | {'cells': 4})
    with pytest.raises(ValueError, match='cells.*needs bias'):
        kernel_attention(**arguments | {'bias': None})
    with pytest.raises(ValueError, match='cells and far'):
        kernel_attention(**arguments | {'far': torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"'window' cannot serve.*cells.*auto, direct"):
        kernel_attention(**arguments, backend='window')
    sequence = make_case(n=20, cells=4).arguments()
    with pytest.raises(ValueError, match=r'cells \(4, 4\).*a whole number'):
        kernel_attention(**sequence | {'cells': (4, 4)})
    with pytest.raises(ValueError, match='causal.*cells'):
        kernel_attention(**sequence | {'causal': True})
    with pytest.raises(ValueError, match="'cells' cannot serve.*no cells"):
        kernel_attention(**make_case(grid_size=(3, 3)).arguments(), backend='cells')


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('shape', [{'grid_size': (3, 4), 'cells': (2, 3)}, {'n': 7, 'cells': 3}], ids=str)
def test_gradcheck(shape, backend):
    case = make_case(**shape, batch=1, m=3, d=2)
    leaves = {name: x.requires_grad_() for name, x in case.tensors().items()}

    def run(*tensors):
        return dataclasses.replace(case, **dict(zip(leaves, tensors))).run(backend)

    assert torch.autograd.gradcheck(run, tuple(leaves.values()), atol=1e-7)


def test_graphs_from_before_there_were_cells_still_run():
    """Exported programs call the op with ten arguments."""
    case = make_case(grid_size=(3, 4), dtype=torch.float32)
    tensors = [x.requires_grad_() for x in (case.phi_q, case.phi_k, case.v, case.bias)]
    z = torch.ops.nprf_vit.attend(*tensors, None, 3, 4, False, True, 'auto')[0]
    assert torch.equal(z, case.run('auto'))
    assert all(g.any() for g in torch.autograd.grad(z.square().sum(), tensors))


def test_operations_are_counted():
    case = make_case(grid_size=(28, 28), cells=(2, 3), dtype=torch.float32, batch=2, heads=3, m=8, d=4)
    case = case.map(lambda x: x.requires_grad_())
    with FlopCounterMode(display=False) as counter:
        case.run('cells').sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()['Global'].items()}
    assert counts['nprf_vit.attend'] == 2 * 6 * (2 * 784 + 36) * 8 * 5
    assert counts['nprf_vit.attend_backward'] == 2 * 6 * (5 * 784 + 3 * 36) * 8 * 5


@pytest.mark.parametrize('budget', [512 << 20, 1000])
@pytest.mark.parametrize(('grid', 'cells'), [((9, 8), (4, 3)), ((8, 6), (4, 3)), ((1, 9), (1, 4))], ids=str)
def test_off_the_cpu(grid, cells, budget, monkeypatch):
    """What accelerators run, on the CPU: all heads and items at once, or one by one."""
    monkeypatch.setattr(cells_backend, '_DEVICE_BYTES', budget)
    monkeypatch.setattr(cells_backend, '_on_cpu', lambda x: False)
    case = make_case(grid_size=grid, cells=cells, heads=3)
    inputs = case.phi_q, case.phi_k, case.v, case.bias, None
    z, den = batched.attend(*inputs, grid, False, True, cells)
    assert_output(z, case, 1e-10)
    cotangent = torch.randn(z.shape, dtype=z.dtype)
    grads = batched.attend_backward(*inputs, z, den, cotangent, grid, False, True, cells)
    names = list(case.tensors())
    exact = gradients(lambda c: reference.attention(**c.arguments()), case, cotangent, names)
    assert_gradients(dict(zip(names, grads)), exact, 1e-9)


@needs_fake_cuda
@pytest.mark.parametrize('grid', [(9, 8), (8, 6)], ids=str)
def test_nothing_is_read_on_the_host(grid):
    n = grid[0] * grid[1]
    with FakeTensorMode():
        phi_q, phi_k, v = (torch.empty(2, 3, n, size, device='cuda') for size in (8, 8, 4))
        inputs = phi_q, phi_k, v, torch.empty(3, 7, 5, device='cuda'), None
        z, den = batched.attend(*inputs, grid, False, True, (4, 3))
        grads = batched.attend_backward(*inputs, z, den, v, grid, False, True, (4, 3))
        assert [g.shape for g in grads[:4]] == [x.shape for x in inputs[:4]]
    assert choose_backend(grid, 8, 4, False, True, device='cuda', cells=(4, 3)) == 'cells'
    assert choose_backend(grid, 8, 4, False, True, device='cuda', cells=grid) == 'fused'
