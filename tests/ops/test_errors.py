"""Bad input to `kernel_attention`: one ValueError each, with the offending values and what was expected."""

import numpy
import pytest
import torch

from nprf_vit.ops import DecodeState, kernel_attention


def arguments(**changes):
    """A valid call on a 2x3 grid with 2 heads, changed."""
    phi = torch.ones(1, 2, 6, 4)
    valid = {'phi_q': phi, 'phi_k': phi, 'v': torch.ones(1, 2, 6, 5), 'bias': torch.zeros(2, 3, 5), 'grid_size': (2, 3)}
    return valid | changes


def sequence(**changes):
    return arguments(**{'bias': torch.zeros(2, 11), 'grid_size': None} | changes)


def test_the_valid_calls_are_valid():
    kernel_attention(**arguments())
    kernel_attention(**sequence())
    kernel_attention(**sequence(causal=True))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'phi_q': torch.ones(2, 6, 4)}, r'\(B, heads, N, M\).*phi_q \(2, 6, 4\)'),
        ({'v': torch.ones(2, 6, 5)}, r'\(B, heads, N, D\).*v \(2, 6, 5\)'),
        ({'phi_k': torch.ones(1, 2, 6, 3)}, r'\(1, 2, 6, 4\).*\(1, 2, 6, 3\)'),
        ({'phi_k': torch.ones(1, 2, 5, 4)}, r'\(1, 2, 6, 4\).*\(1, 2, 5, 4\)'),
        ({'phi_k': torch.ones(1, 1, 6, 4)}, r'\(1, 2, 6, 4\).*\(1, 1, 6, 4\)'),
        ({'v': torch.ones(1, 2, 7, 5)}, r'v \(1, 2, 7, 5\)'),
        ({'v': torch.ones(1, 3, 6, 5)}, r'v \(1, 3, 6, 5\)'),
        ({'v': torch.ones(2, 2, 6, 5)}, r'v \(2, 2, 6, 5\)'),
        ({'v': torch.ones(1, 2, 6, 0)}, r'v \(1, 2, 6, 0\)'),
        ({'phi_q': torch.ones(1, 2, 6, 0), 'phi_k': torch.ones(1, 2, 6, 0)}, r'\(1, 2, 6, 0\)'),
    ],
)
def test_shapes(changes, message):
    with pytest.raises(ValueError, match=message):
        kernel_attention(**arguments(**changes))


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (arguments(bias=torch.zeros(2, 5, 3)), r'\(2, 5, 3\).*2x3.*\(2, 3, 5\)'),  # transposed
        (arguments(bias=torch.zeros(3, 3, 5)), r'\(3, 3, 5\).*\(2, 3, 5\)'),
        (arguments(bias=torch.zeros(3, 5)), r'\(3, 5\).*\(2, 3, 5\)'),
        (arguments(bias=torch.zeros(2, 11)), r'\(2, 11\).*\(2, 3, 5\)'),
        (arguments(bias=torch.zeros(1, 2, 6, 6)), r'\(1, 2, 6, 6\).*\(2, 3, 5\)'),
        (sequence(bias=torch.zeros(2, 3, 5)), r'\(2, 3, 5\).*\(2, 11\)'),
        (sequence(bias=torch.zeros(2, 12)), r'\(2, 12\).*\(2, 11\)'),
        (sequence(bias=torch.zeros(2, 6), causal=True), r'\(2, 6\).*\(2, 11\)'),
        (sequence(bias=torch.zeros(1, 11)), r'\(1, 11\).*\(2, 11\)'),
        (arguments(bias=torch.zeros(2, 2, 5), far=torch.zeros(2)), r'\(2, 2, 5\).*2R\+1'),
        (arguments(bias=torch.zeros(2, 5), far=torch.zeros(2)), r'\(2, 5\).*2R\+1, 2S\+1'),
        (sequence(bias=torch.zeros(2, 4), far=torch.zeros(2)), r'\(2, 4\).*2R\+1'),
        (sequence(bias=torch.zeros(2, 5), far=torch.zeros(3)), r'far \(3,\).*\(2,\)'),
        (sequence(bias=torch.zeros(2, 5), far=torch.zeros(())), r'far \(\).*\(2,\)'),
        (sequence(bias=None, far=torch.zeros(2)), r'far.*bias'),
    ],
)
def test_bias(call, message):
    with pytest.raises(ValueError, match=message):
        kernel_attention(**call)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (arguments(grid_size=(2, 4), bias=torch.zeros(2, 3, 7)), r'2x4.*8.*6'),
        (arguments(grid_size=(2, 4), bias=None), r'2x4.*8.*6'),
        (arguments(grid_size=(-2, -3), bias=None), r'-2.*-3'),
        (arguments(grid_size=(6,), bias=None), r'\(6,\)'),
        (arguments(grid_size=6, bias=None), '6'),
        (arguments(causal=True), r'causal.*\(2, 3\)'),
        (arguments(causal=True, bias=None), r'causal.*\(2, 3\)'),
    ],
)
def test_grids(call, message):
    with pytest.raises(ValueError, match=message):
        kernel_attention(**call)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'phi_q': torch.ones(1, 2, 6, 4, dtype=torch.float64)}, 'float64.*float32'),
        ({'phi_k': torch.ones(1, 2, 6, 4, dtype=torch.bfloat16)}, 'float32.*bfloat16'),
        ({'v': torch.ones(1, 2, 6, 5, dtype=torch.float64)}, 'float32.*float64'),
        ({'v': torch.ones(1, 2, 6, 5, dtype=torch.long)}, 'int64'),
        ({'v': torch.ones(1, 2, 6, 5, dtype=torch.complex64)}, 'complex64'),
        ({'bias': torch.zeros(2, 3, 5, dtype=torch.float64)}, 'float64.*float32'),
        ({'bias': torch.zeros(2, 3, 5, dtype=torch.long)}, 'int64'),
        ({'far': torch.zeros(2, dtype=torch.float64)}, 'float64.*float32'),
        (
            {name: torch.ones(1, 2, 6, 4, dtype=torch.bfloat16) for name in ('phi_q', 'phi_k')},
            'bfloat16.*float32',
        ),
        (
            {name: torch.ones(1, 2, 6, 4, dtype=torch.bfloat16) for name in ('phi_q', 'phi_k')}
            | {'v': torch.ones(1, 2, 6, 5, dtype=torch.float16)},
            'bfloat16.*float16',
        ),
        (
            {name: torch.ones(1, 2, 6, 4, dtype=torch.float64) for name in ('phi_q', 'phi_k')}
            | {'v': torch.ones(1, 2, 6, 5, dtype=torch.bfloat16)},
            'float64.*bfloat16',
        ),
    ],
)
def test_dtypes(changes, message):
    with pytest.raises(ValueError, match=message):
        kernel_attention(**arguments(**changes))


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (arguments(bias=numpy.zeros((2, 3, 5), numpy.float32)), r'bias is the numpy.ndarray: expected a torch.Tensor'),
        (arguments(bias=[[0.0]]), 'bias is the list'),
        (sequence(far=0.0), r'far is the float 0.0: expected a torch.Tensor, one value per head'),
        (arguments(phi_q=numpy.ones((1, 2, 6, 4))), 'phi_q is the numpy.ndarray'),
        (arguments(grid_size=(2.0, 3.0)), r'grid_size must be \(H, W\) with positive whole sizes, got \(2.0, 3.0\)'),
        (arguments(grid_size='23'), 'grid_size must be .* got 23'),
        (arguments(cells=(1.0, 2.0)), r'cells \(1.0, 2.0\).*whole numbers'),
        (sequence(cells=2.5), 'cells 2.5 of a sequence.*whole number'),
        (arguments(key_mask=numpy.ones((1, 6), bool)), 'key_mask must be a tensor of bool, got ndarray'),
    ],
)
def test_what_is_no_tensor_and_no_whole_number(call, message):
    with pytest.raises(ValueError, match=message):
        kernel_attention(**call)


def test_whole_numbers_of_numpy_are_whole_numbers():
    grid = numpy.int64(2), numpy.int32(3)
    assert torch.equal(kernel_attention(**arguments(grid_size=grid)), kernel_attention(**arguments()))


def test_decoding():
    with pytest.raises(ValueError, match='bias is the numpy.ndarray'):
        DecodeState(numpy.zeros((2, 5)))
    with pytest.raises(ValueError, match='far is the float 0.5'):
        DecodeState(torch.zeros(2, 5), far=0.5)
    with pytest.raises(ValueError, match='phi_q is the list'):
        DecodeState().step([1.0], torch.ones(1, 2, 4), torch.ones(1, 2, 4))


@pytest.mark.parametrize('name', ['phi_q', 'phi_k', 'v', 'bias', 'far'])
def test_devices(name):
    call = arguments(far=torch.zeros(2))
    with pytest.raises(ValueError, match='(cpu.*meta|meta.*cpu)'):
        kernel_attention(**call | {name: call[name].to('meta')})


@pytest.mark.parametrize('backend', ['softmax', '', None, 'Direct'])
def test_unknown_backends(backend):
    with pytest.raises(ValueError, match=rf'{backend}.*direct.*fft.*linear'):
        kernel_attention(**arguments(backend=backend))


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (arguments(backend='linear'), r"'linear'.*bias.*direct.*fft"),
        (sequence(backend='linear', causal=True), r"'linear'.*bias.*direct"),
        (arguments(backend='fft', bias=None), r"'fft'.*no bias.*direct, linear"),
        (sequence(backend='step'), r"'step'.*causal.*direct"),
        (arguments(backend='step'), r"'step'.*causal.*direct"),
        (arguments(backend='flex'), r"'flex'.*cpu.*direct"),
        (arguments(backend='flex', positive=False), r"'flex'.*direct"),
    ],
)
def test_backends_that_cannot_serve_say_which_can(call, message):
    with pytest.raises(ValueError, match=message):
        kernel_attention(**call)


@pytest.mark.parametrize('name', ['phi_q', 'phi_k', 'v', 'bias'])
def test_step_has_no_gradients(name):
    call = sequence(backend='step', causal=True)
    call[name] = call[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"'step'.*gradient.*direct"):
        kernel_attention(**call)
    with torch.no_grad():
        kernel_attention(**call)


def test_refusal_does_not_depend_on_values():
    """Every backend that serves a shape serves it with any bias, and the other way around."""
    for value in (0.0, 30.0, 80.0):
        bias = torch.zeros(2, 3, 5)
        bias[:, 0, 0] = value
        for backend in ('direct', 'fft', 'auto'):
            kernel_attention(**arguments(bias=bias, backend=backend))
        with pytest.raises(ValueError, match='linear'):
            kernel_attention(**arguments(bias=bias, backend='linear'))
