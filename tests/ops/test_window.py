"""The window backend: dense inside the window, linear outside, exact whichever dominates."""

import dataclasses

import pytest
import torch

from nprf_vit.ops import choose_backend, kernel_attention
from nprf_vit.ops.backends import window
from nprf_vit.ops.backends.interface import Inputs
from nprf_vit.ops.bias import Bias

from .compare import Case, assert_output, check, make_case

GRIDS = [(1, 1), (1, 5), (3, 2), (7, 14), (11, 13), (13, 1), (33, 35)]


def make_window(radius, far=0.0, std=0.5, **kwargs) -> Case:
    """A case whose bias is a window of the given radius, with a far constant per head around `far`."""
    case = make_case(std=None, **kwargs)
    heads, dtype = case.v.shape[1], case.v.dtype
    generator = torch.Generator().manual_seed(3)
    bias = std * torch.randn(heads, *(2 * r + 1 for r in radius), generator=generator, dtype=torch.float64)
    far = far + 0.1 * torch.randn(heads, generator=generator, dtype=torch.float64)
    return dataclasses.replace(case, bias=bias.to(dtype), far=far.to(dtype))


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
@pytest.mark.parametrize('radius', [(0, 0), (1, 1), (2, 5), (13, 13)], ids=str)
@pytest.mark.parametrize('grid', GRIDS, ids=str)
def test_grids(grid, radius, dtype):
    check(make_window(radius, grid_size=grid, dtype=dtype), 'window')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('radius', [0, 3, 70])
@pytest.mark.parametrize('n', [1, 2, 37, 64, 65, 257])
def test_sequences(n, radius, causal, dtype):
    check(make_window((radius,), n=n, causal=causal, dtype=dtype), 'window')


# A far constant that dwarfs the window by up to e^5 is float32's, up to e^25 float64's, beyond that `direct`'s
@pytest.mark.parametrize('far', [-80.0, -30.0, -5.0, 3.0, 10.0, 30.0, 80.0])
@pytest.mark.parametrize(
    'shape', [{'grid_size': (17, 19)}, {'grid_size': (5, 40)}, {'n': 90}, {'n': 90, 'causal': True}], ids=str
)
def test_far_dwarfs_the_window_or_the_reverse(far, shape):
    radius = (4, 4) if 'grid_size' in shape else (4,)
    check(make_window(radius, far=far, dtype=torch.float32, **shape), 'window')


@pytest.mark.parametrize('far', [4.0, 8.0, 20.0])
@pytest.mark.parametrize('causal', [False, True])
def test_every_single_weight_is_right_relative_to_itself(far, causal):
    shape = {'n': 150, 'causal': True} if causal else {'grid_size': (12, 25)}
    case = make_window((3,) if causal else (3, 3), far=far, dtype=torch.float32, batch=1, **shape)
    n = case.v.shape[2]
    case = dataclasses.replace(case, v=torch.eye(n).expand(1, 2, n, n).contiguous())
    assert_output(case.run('window'), case, 1e-3)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
@pytest.mark.parametrize('scale', [1.0, 1e10])
@pytest.mark.parametrize('peak', [19.0, 30.0, 88.0, 95.0, 104.0, 290.0, 310.0, 720.0, 1e4])
@pytest.mark.parametrize('shape', [{'n': 90, 'causal': True}, {'n': 90}, {'grid_size': (9, 12)}], ids=str)
def test_a_peak_that_some_rows_do_not_see(shape, peak, scale, dtype):
    """Rows at the border lack the offset with the largest bias: scaled by it, nothing would be left of them."""
    case = make_window((4, 4) if 'grid_size' in shape else (4,), dtype=dtype, **shape)
    case.phi_k *= scale
    case.bias.view(2, -1)[:, 1] += peak
    check(case, 'window')


def test_masking_everything_beyond_the_window():
    case = make_window((2, 2), grid_size=(9, 9), dtype=torch.float32)
    case = dataclasses.replace(case, far=torch.full((2,), -torch.inf))
    for backend in ('window', 'direct'):
        assert_output(case.run(backend), case, 1e-4)


def test_causal_windows_never_look_ahead():
    case = make_window((6,), n=200, causal=True, dtype=torch.float32)
    other = case.map(lambda t: t.clone())
    for x in (other.phi_q, other.phi_k, other.v):
        x[:, :, 100:] = 7.0
    assert torch.equal(case.run('window')[:, :, :100], other.run('window')[:, :, :100])


def test_a_wrong_far_constant_is_noticed():
    case = make_window((2, 2), grid_size=(9, 9))
    wrong = dataclasses.replace(case, far=case.far + 1e-3)
    with pytest.raises(AssertionError, match='error'):
        assert_output(wrong.run('window'), case, 1e-8)


def test_a_transposed_window_is_noticed():
    case = make_window((2, 3), grid_size=(9, 9))
    wrong = dataclasses.replace(case, bias=case.bias.transpose(1, 2))
    with pytest.raises(AssertionError, match='error'):
        assert_output(wrong.run('window'), case, 1e-8)


def test_the_gradient_of_bias_and_far_is_reproducible():
    case = make_window((3, 3), grid_size=(20, 21), dtype=torch.float32)

    def gradient():
        leaves = [x.clone().requires_grad_() for x in (case.bias, case.far)]
        changed = dataclasses.replace(case, bias=leaves[0], far=leaves[1])
        return torch.autograd.grad(changed.run('window').square().sum(), leaves)

    for first, second in zip(gradient(), gradient()):
        assert torch.equal(first, second)


def test_rounding_stays_below_the_assumed_constant():
    """The constant behind the range, where it bites most: every value sits inside the window, far dominates."""
    case = make_window((4, 4), far=5.0, std=0.0, grid_size=(40, 41), dtype=torch.float32, batch=1, m=16)
    n = case.v.shape[2]
    tokens = torch.arange(0, n, 97)
    v = torch.zeros(1, 2, n, len(tokens))
    v[:, :, tokens, torch.arange(len(tokens))] = 1
    inputs = Inputs(case.phi_q, case.phi_k, v, Bias(case.bias, case.far))
    num, den = window.forward(inputs, case.grid_size, False, torch.float32)
    z = (num / den.unsqueeze(-1)).double()
    a = case.weights()[..., tokens]
    units = ((z - a).abs() / a).max() / 2**-24 / torch.exp(case.far.max() - case.bias.min())
    assert units <= window._ROUNDING


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('radius', [500, 1500])
def test_long_sums_round_more(radius, causal):
    """Equal features, whose rounding adds up in one direction, and values seen by all: the promise at the edge."""
    n = 2000
    phi, v = torch.full((1, 1, n, 4), 0.3), torch.zeros(1, 1, n, 3)
    v[..., 0], v[:, :, 300, 1], v[..., 2] = 1, 1, torch.rand(n, generator=torch.Generator().manual_seed(0))
    case = Case(phi, phi, v, torch.zeros(1, 2 * radius + 1), torch.tensor([5.29]), None, causal)
    assert_output(case.run('window'), case, 1e-3)


def test_a_window_of_all_offsets_is_an_ordinary_table():
    case = make_window((11, 4), far=3.0, grid_size=(9, 5), dtype=torch.float32)
    assert torch.equal(case.run('window'), case.run('direct'))
    check(case, 'window')


def test_the_cost_model_takes_the_window_where_it_is_smaller():
    assert choose_backend((14, 14), 32, 64, False, True, radius=(13, 13)) == 'direct'
    assert choose_backend((64, 64), 32, 64, False, True, radius=(13, 13)) == 'window'
    assert choose_backend((256, 256), 32, 64, False, True, radius=(255, 255)) == 'fft'
    assert choose_backend((1, 3072), 32, 64, True, True, radius=(0, 100)) == 'window'


def test_windows_that_do_not_fit_say_what_would():
    case = make_window((2, 2), grid_size=(9, 9))
    arguments = case.arguments()
    with pytest.raises(ValueError, match=r'\(2, 4, 5\).*\(heads, 2R\+1, 2S\+1\)'):
        kernel_attention(**arguments | {'bias': case.bias[:, 1:]}, backend='window')
    with pytest.raises(ValueError, match=r'\(2, 5, 5\).*expected \(2, 17, 17\), or a window with far'):
        kernel_attention(**arguments | {'far': None}, backend='window')
    with pytest.raises(ValueError, match=r"'window'.*no far constant.*direct, fft"):
        kernel_attention(**arguments | {'far': None, 'bias': torch.zeros(2, 17, 17).double()}, backend='window')
    with pytest.raises(ValueError, match=r'far \(1,\).*expected \(2,\)'):
        kernel_attention(**arguments | {'far': case.far[:1]}, backend='window')
