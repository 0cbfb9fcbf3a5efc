"""Every backend against the dense float64 oracle: outputs and all gradients, whatever the shape."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from nprf_vit.ops import reference

from .compare import GRADIENT_TOLERANCE, assert_gradients, assert_output, check, gradients, make_case, tolerance

GRIDS = [(1, 1), (1, 5), (3, 2), (7, 14), (11, 13), (13, 1)]
SEQUENCES = [1, 2, 5, 37, 257]


def shape(n=None, grid_size=None, causal=False):
    name = f'{grid_size[0]}x{grid_size[1]}' if grid_size else f'{"causal" if causal else "seq"}{n}'
    return pytest.param({'n': n, 'grid_size': grid_size, 'causal': causal}, id=name)


SHAPES = [shape(grid_size=grid) for grid in GRIDS] + [shape(n, causal=c) for c in (False, True) for n in SEQUENCES]
# a little more than 256, 512 and 1024 tokens: a last tile with a few rows, and more than one tile of keys
TILED = [shape(grid_size=(20, 13)), shape(grid_size=(33, 35)), shape(1030)] + [
    shape(n, causal=True) for n in (258, 515, 1025)
]
DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])


@DTYPES
@pytest.mark.parametrize('batch', [1, 2], ids=['B1', 'B2'])
@pytest.mark.parametrize('backend', ['direct', 'fft', 'auto'])
@pytest.mark.parametrize('shape', SHAPES)
def test_with_bias(shape, backend, batch, dtype):
    check(make_case(**shape, batch=batch, dtype=dtype), backend)


@DTYPES
@pytest.mark.parametrize('batch', [1, 2], ids=['B1', 'B2'])
@pytest.mark.parametrize('backend', ['direct', 'linear', 'auto'])
@pytest.mark.parametrize('shape', SHAPES)
def test_without_bias(shape, backend, batch, dtype):
    check(make_case(**shape, batch=batch, std=None, dtype=dtype), backend)


@pytest.mark.parametrize('batch', [1, 2], ids=['B1', 'B2'])
@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear'])
@pytest.mark.parametrize('shape', TILED)
def test_tile_boundaries(shape, backend, batch):
    std = None if backend == 'linear' else 0.5
    check(make_case(**shape, batch=batch, heads=2, m=4, d=3, std=std, dtype=torch.float32), backend)


def test_levels_of_a_long_causal_sequence():
    check(make_case(2050, causal=True, batch=1, heads=1, m=3, d=2, dtype=torch.float32), 'fft')


@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear', 'auto'])
@pytest.mark.parametrize('sizes', [(1, 1, 1), (3, 1, 5), (1, 7, 1), (2, 33, 17)], ids='K{0[0]}-M{0[1]}-D{0[2]}'.format)
def test_sizes_of_heads_features_and_values(sizes, backend):
    heads, m, d = sizes
    std = None if backend == 'linear' else 0.5
    check(make_case(grid_size=(5, 4), heads=heads, m=m, d=d, std=std), backend)
    check(make_case(9, causal=True, heads=heads, m=m, d=d, std=std), backend)


# Which gradients are asked for decides which are computed; bias and features take different paths at B=1 and B=2.

NAMES = ['phi_q', 'phi_k', 'v', 'bias']
SUBSETS = [
    pytest.param(backend, names, id=f'{backend}-{"+".join(names) or "none"}')
    for backend in ('direct', 'fft', 'linear')
    for size in range(5)
    for names in combinations(NAMES, size)
    if backend != 'linear' or 'bias' not in names
]


@pytest.mark.parametrize('batch', [1, 2], ids=['B1', 'B2'])
@pytest.mark.parametrize(('backend', 'names'), SUBSETS)
def test_any_subset_of_gradients(backend, names, batch):
    std = None if backend == 'linear' else 0.5
    check(make_case(grid_size=(4, 5), batch=batch, std=std), backend, names)
    check(make_case(11, causal=True, batch=batch, std=std), backend, names)


@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear'])
def test_a_broadcast_cotangent(backend):
    """`z.sum().backward()` hands over one number expanded to every element."""
    case = make_case(grid_size=(3, 4), std=None if backend == 'linear' else 0.5)
    ones = torch.ones((), dtype=torch.float64).expand_as(case.v)
    actual = gradients(lambda c: c.run(backend), case, ones, case.tensors())
    exact = gradients(lambda c: reference.attention(**c.arguments()), case, ones, case.tensors())
    assert_gradients(actual, exact, GRADIENT_TOLERANCE[torch.float64])


# Layouts


def head_last(t):
    """The layout of `qkv.reshape(B, N, K, D).transpose(1, 2)`; for a table, heads or columns last."""
    return t.transpose(-3, -2).contiguous().transpose(-3, -2) if t.dim() == 4 else t.mT.contiguous().mT


def every_other(t):
    return t.repeat_interleave(2, -1)[..., ::2]


def sliced(t):
    """A view with an offset into a larger buffer, as `qkv.unbind` gives."""
    return torch.nn.functional.pad(t, (1, 2, 1, 1))[..., 1:-1, 1:-2]


@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear'])
@pytest.mark.parametrize('layout', [head_last, every_other, sliced])
@pytest.mark.parametrize('shape', [shape(grid_size=(7, 4)), shape(15, causal=True)])
def test_non_contiguous(shape, layout, backend):
    case = make_case(**shape, std=None if backend == 'linear' else 0.5)
    strided = case.map(layout)
    assert not any(t.is_contiguous() for t in (strided.phi_q, strided.phi_k, strided.v))
    assert torch.equal(strided.phi_q, case.phi_q)
    assert_output(strided.run(backend), case, tolerance(backend, torch.float64))
    cotangent = layout(torch.randn_like(case.v))
    # a strided leaf stays strided: clone() keeps the layout of dense tensors only
    leaves = {name: t.detach().requires_grad_() for name, t in strided.tensors().items()}
    actual = torch.autograd.grad(replace(strided, **leaves).run(backend), list(leaves.values()), cotangent)
    exact = gradients(lambda c: reference.attention(**c.arguments()), case, cotangent, list(leaves))
    assert_gradients(dict(zip(leaves, actual)), exact, GRADIENT_TOLERANCE[torch.float64])


@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear'])
def test_expanded_inputs(backend):
    """One key for all heads, one table for all heads: stride 0."""
    case = make_case(grid_size=(4, 3), std=None if backend == 'linear' else 0.5)
    case.phi_k, case.v = case.phi_k[:, :1].expand_as(case.phi_k), case.v[:1].expand_as(case.v)
    if case.bias is not None:
        case.bias = case.bias[:1].expand_as(case.bias)
    check(case, backend)


# Special arguments


@pytest.mark.parametrize('window', [(1, 1), (3, 3), (5, 1), (3, 9), (15, 13)], ids='{0[0]}x{0[1]}'.format)
@pytest.mark.parametrize('backend', ['direct', 'fft', 'auto'])
def test_far_on_a_grid(window, backend):
    case = make_case(grid_size=(5, 4))
    case.bias, case.far = torch.randn(2, *window).double(), torch.randn(2).double()
    check(case, backend)


@pytest.mark.parametrize('window', [1, 5, 21, 31])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('backend', ['direct', 'fft', 'auto'])
def test_far_on_a_sequence(window, causal, backend):
    case = make_case(11, causal=causal)
    case.bias, case.far = torch.randn(2, window).double(), torch.randn(2).double()
    check(case, backend)


@DTYPES
@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear', 'auto'])
@pytest.mark.parametrize('shape', [shape(grid_size=(7, 14)), shape(37, causal=True)])
def test_features_of_either_sign(shape, backend, dtype):
    case = make_case(**shape, kind='trf', m=64, std=None if backend == 'linear' else 0.5, dtype=dtype)
    assert case.phi_k.min() < 0
    check(case, backend, positive=False)


@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear', 'step'])
def test_denominators_of_either_sign(backend):
    """Trigonometric features of long vectors give negative sums; normalization is still a division."""
    case = make_case(37, causal=True, std=None if backend == 'linear' else 0.5)
    case.phi_q, case.phi_k = torch.randn_like(case.phi_q), torch.randn_like(case.phi_k)
    sums = torch.einsum('bkim,bkjm->bkij', case.phi_q, case.phi_k).tril().sum(-1)
    assert sums.min() < 0 < sums.max()
    check(case, backend, names=() if backend == 'step' else None, positive=False)


@DTYPES
@pytest.mark.parametrize('std', [None, 0.5])
@pytest.mark.parametrize('n', [1, 2, 5, 37])
def test_step(n, std, dtype):
    check(make_case(n, causal=True, std=std, dtype=dtype), 'step', names=())


@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear', 'auto', 'step'])
def test_inputs_are_left_alone(backend):
    case = make_case(11, causal=True, std=None if backend == 'linear' else 0.5)
    before = case.map(torch.clone)
    case.run(backend)
    for name, t in case.tensors().items():
        assert torch.equal(t, before.tensors()[name]), f'{name} was overwritten'


# The assertions above can fail: each wrong answer here is one that a wrong implementation would give.


def flip_table(case):
    return replace(case, bias=case.bias.flip(tuple(range(1, case.bias.dim()))))


def flip_columns(case):
    return replace(case, bias=case.bias.flip(-1))


def transpose_grid(case):
    height, width = case.grid_size
    return replace(case, grid_size=(width, height), bias=case.bias.mT.contiguous())


def shift_table(case):
    return replace(case, bias=case.bias.roll(1, -1))


def forget_bias(case):
    return replace(case, bias=None)


def forget_mask(case):
    return replace(case, causal=False)


def swap_roles(case):
    return replace(case, phi_q=case.phi_k, phi_k=case.phi_q)


def swap_heads(case):
    return replace(case, bias=case.bias.roll(1, 0))


def next_value(case):
    return replace(case, v=case.v.roll(1, 2))


@pytest.mark.parametrize('backend', ['direct', 'fft'])
@pytest.mark.parametrize(
    'mistake',
    [flip_table, flip_columns, transpose_grid, shift_table, forget_bias, swap_roles, swap_heads, next_value],
    ids=lambda f: f.__name__,
)
def test_a_wrong_answer_on_a_grid_is_noticed(mistake, backend):
    # the weakest bias that anyone trains with: trunc_normal(0.02)
    case = make_case(grid_size=(5, 4), std=0.02, dtype=torch.float32)
    mistaken = mistake(case)
    backend = 'direct' if mistaken.bias is None else backend
    with pytest.raises(AssertionError, match='of the terms of its element'):
        assert_output(mistaken.run(backend), case, tolerance('fft', torch.float32))
    exact = gradients(
        lambda c: reference.attention(**c.arguments()), case.map(torch.Tensor.double), case.v.double(), NAMES
    )
    wrong = gradients(lambda c: c.run(backend), mistaken, case.v, mistaken.tensors())
    exact = {name: exact[name] for name in wrong}
    with pytest.raises(AssertionError, match='of its norm'):
        assert_gradients(wrong, exact, GRADIENT_TOLERANCE[torch.float32])


WITHOUT_BIAS = [forget_mask, swap_roles, next_value]
WITH_BIAS = [*WITHOUT_BIAS, flip_table, shift_table]


@pytest.mark.parametrize(
    ('backend', 'mistake'),
    [(b, f) for b in ('direct', 'fft') for f in WITH_BIAS] + [('linear', f) for f in WITHOUT_BIAS],
    ids=lambda x: getattr(x, '__name__', x),
)
def test_a_wrong_answer_on_a_causal_sequence_is_noticed(mistake, backend):
    case = make_case(17, causal=True, std=None if backend == 'linear' else 0.02, dtype=torch.float32)
    with pytest.raises(AssertionError, match='of the terms of its element'):
        assert_output(mistake(case).run(backend), case, tolerance('fft', torch.float32))


def test_a_gradient_with_one_wrong_entry_is_noticed():
    case = make_case(grid_size=(5, 4))
    exact = gradients(lambda c: reference.attention(**c.arguments()), case, case.v, case.tensors())
    for name, g in exact.items():
        wrong = torch.where(g.abs() == g.abs().max(), g / 2, g)
        with pytest.raises(AssertionError, match=f'gradient of {name}'):
            assert_gradients({**exact, name: wrong}, exact, GRADIENT_TOLERANCE[torch.float32])
