"""`torch.func` through the ops: grad, jacrev, vmap, jvp and their compositions, and derivatives of higher order."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from nprf_vit.ops import PrefixBias, kernel_attention, prefix_attention, reference

from .compare import make_case

SHAPES = {
    'grid': {'grid_size': (3, 4)},
    'sequence': {'n': 7},
    'causal': {'n': 7, 'causal': True},
    'cells': {'grid_size': (4, 6), 'cells': (2, 3)},
    'plain': {'n': 7, 'std': None},
}
# every algorithm once, `direct` on all shapes
SERVED = [*(('direct', shape) for shape in SHAPES), ('fft', 'grid'), ('cells', 'cells'), ('linear', 'plain')]
SERVED += [('window', 'far'), ('direct', 'far'), ('auto', 'grid'), ('fft', 'causal')]


def make(shape):
    if shape != 'far':
        return make_case(**SHAPES[shape])
    case = make_case(grid_size=(5, 6))
    return replace(case, bias=case.bias[:, 3:6, 4:7].clone(), far=torch.randn(2, dtype=torch.float64))


def as_function(case, backend):
    """The attention of the case as a function of its tensors, and these."""
    names, tensors = list(case.tensors()), tuple(case.tensors().values())
    return (lambda *args: replace(case, **dict(zip(names, args))).run(backend)), tensors


def oracle(case):
    names = list(case.tensors())
    return lambda *args: reference.attention(**replace(case, **dict(zip(names, args))).arguments())


def assert_close(actual, expected, name=''):
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9, msg=lambda m: f'{name}: {m}')


def all_of(tensors):
    return tuple(range(len(tensors)))


@pytest.mark.parametrize(('backend', 'shape'), SERVED)
def test_grad(backend, shape):
    case = make(shape)
    function, tensors = as_function(case, backend)
    expected = grad(lambda *x: oracle(case)(*x).square().sum(), all_of(tensors))(*tensors)
    actual = grad(lambda *x: function(*x).square().sum(), all_of(tensors))(*tensors)
    for name, a, b in zip(case.tensors(), actual, expected):
        assert_close(a, b, name)


@pytest.mark.parametrize(('backend', 'shape'), SERVED)
def test_jacrev_and_jacfwd(backend, shape):
    case = make(shape)
    function, tensors = as_function(case, backend)
    last = len(tensors) - 1  # the bias, where there is one, or what lies beyond it
    expected = jacrev(lambda *x: oracle(case)(*x)[:, :, 1], last)(*tensors)
    assert_close(jacrev(lambda *x: function(*x)[:, :, 1], last)(*tensors), expected)
    assert_close(jacfwd(lambda *x: function(*x)[:, :, 1], last)(*tensors), expected)


@pytest.mark.parametrize(('backend', 'shape'), SERVED)
def test_gradients_per_sample(backend, shape):
    """Of one bias by each item of a batch, which are what folding the items into one batch would add up."""
    case = make(shape)
    function, tensors = as_function(case, backend)
    items = [name for name in case.tensors() if name not in ('bias', 'far')]
    weight = torch.arange(1.0, 3, dtype=torch.float64)

    def loss(scale, *x):
        return (scale * function(*(t[None] if n in items else t for n, t in zip(case.tensors(), x)))).square().sum()

    dims = (0, *(0 if n in items else None for n in case.tensors()))
    arguments = tuple(range(1, len(tensors) + 1))
    actual = vmap(grad(loss, arguments), dims)(weight, *tensors)
    for i in range(2):
        one = tuple(t[i] if n in items else t for n, t in case.tensors().items())
        leaves = [t.clone().requires_grad_() for t in one]
        expected = torch.autograd.grad(loss(weight[i], *leaves), leaves)
        for name, a, b in zip(case.tensors(), actual, expected):
            assert_close(a[i], b, name)


@pytest.mark.parametrize(('backend', 'shape'), SERVED)
def test_vmap_over_each_argument(backend, shape):
    case = make(shape)
    function, tensors = as_function(case, backend)
    for i, t in enumerate(tensors):
        several = torch.stack([t, t * 1.5, t * 0.5], dim=-1)
        actual = vmap(function, tuple(-1 if j == i else None for j in range(len(tensors))))(
            *(several if j == i else x for j, x in enumerate(tensors))
        )
        for s in range(3):
            expected = function(*(several[..., s] if j == i else x for j, x in enumerate(tensors)))
            assert_close(actual[s], expected, list(case.tensors())[i])


@pytest.mark.parametrize(('backend', 'shape'), SERVED)
def test_jvp(backend, shape):
    case = make(shape)
    function, tensors = as_function(case, backend)
    tangents = tuple(torch.randn_like(t) for t in tensors)
    z, expected = jvp(oracle(case), tensors, tangents)
    out, actual = jvp(function, tensors, tangents)
    assert_close(out, z)
    assert_close(actual, expected)
    with forward_ad.dual_level():
        dual = function(*(forward_ad.make_dual(t, d) for t, d in zip(tensors, tangents)))
        assert_close(forward_ad.unpack_dual(dual).tangent, expected)
    # a tangent outside of vmap
    several = torch.stack([tensors[2], tensors[2] * 2])
    _, mapped = jvp(vmap(lambda v: function(*tensors[:2], v, *tensors[3:])), (several,), (torch.ones_like(several),))
    one = jvp(lambda v: function(*tensors[:2], v, *tensors[3:]), (several[1],), (torch.ones_like(several[1]),))[1]
    assert one.abs().max() > 0
    assert_close(mapped[1], one)


@pytest.mark.parametrize(('backend', 'shape'), SERVED)
def test_double_backward(backend, shape):
    case = make(shape)
    function, tensors = as_function(case, backend)

    def penalty(f):
        leaves = [t.clone().requires_grad_() for t in tensors]
        first = torch.autograd.grad(f(*leaves).pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for name, a, b in zip(case.tensors(), penalty(function), penalty(oracle(case))):
        assert_close(a, b, name)


def test_gradgradcheck():
    case = make_case(grid_size=(2, 3), batch=1, m=3)
    function, tensors = as_function(case, 'direct')
    leaves = tuple(t.requires_grad_() for t in tensors)
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_hessian_and_its_product():
    case = make('grid')
    function, tensors = as_function(case, 'direct')
    *others, bias = tensors
    expected = hessian(lambda b: oracle(case)(*others, b).pow(3).sum())(bias)
    assert_close(hessian(lambda b: function(*others, b).pow(3).sum())(bias), expected)
    direction = torch.randn_like(bias)
    product = jvp(grad(lambda b: function(*others, b).pow(3).sum()), (bias,), (direction,))[1]
    assert_close(product, torch.einsum('abcdef,def->abc', expected, direction))
    reverse = vjp(grad(lambda b: function(*others, b).pow(3).sum()), bias)[1](direction)[0]
    assert_close(reverse, product)


def test_vmap_of_vmap():
    case = make('grid')
    function, (phi_q, phi_k, v, bias) = as_function(case, 'direct')
    biases, values = torch.stack([bias, bias * 2]), torch.stack([v, v + 1, v * 2])
    both = vmap(lambda b: vmap(lambda x: function(phi_q, phi_k, x, b))(values))(biases)
    for i in range(2):
        for j in range(3):
            assert_close(both[i, j], function(phi_q, phi_k, values[j], biases[i]))


@pytest.mark.skipif(torch.__version__ < (2, 9), reason='torch.func does not let the oracle read its mask')
def test_masked_keys():
    case = make('grid')
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 5:], mask[1] = False, False
    *others, bias = case.tensors().values()

    def loss(f, b):
        return f(*others, b, grid_size=(3, 4), key_mask=mask).pow(3).sum()

    def exact(phi_q, phi_k, v, b, grid_size, key_mask):
        return reference.attention(phi_q, phi_k, v, b, grid_size=grid_size, key_mask=key_mask)

    expected = grad(lambda b: loss(exact, b))(bias)
    assert_close(grad(lambda b: loss(kernel_attention, b))(bias), expected)
    direction = torch.randn_like(bias)
    expected = jvp(lambda b: loss(exact, b), (bias,), (direction,))[1]
    assert_close(jvp(lambda b: loss(kernel_attention, b), (bias,), (direction,))[1], expected)
    second = jvp(grad(lambda b: loss(kernel_attention, b)), (bias,), (direction,))[1]
    assert_close(second, jvp(grad(lambda b: loss(exact, b)), (bias,), (direction,))[1])


def test_tokens_before_the_grid():
    """The op with denominators: per-sample gradients of every bias, and second derivatives."""
    generator = torch.Generator().manual_seed(0)
    case = make_case(n=14)
    phi_q, phi_k, v = case.phi_q, case.phi_k, case.v
    shapes = [(2, 5, 7), (2, 2), (2, 2), (2, 2, 2)]
    biases = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    def loss(biases, q, k, v):
        table, *prefix = biases
        return prefix_attention(q, k, v, PrefixBias(*prefix), table, grid_size=(3, 4)).pow(3).sum()

    leaves = [b.clone().requires_grad_() for b in biases]
    per_item = [
        torch.autograd.grad(loss(leaves, phi_q[i : i + 1], phi_k[i : i + 1], v[i : i + 1]), leaves) for i in range(2)
    ]
    mapped = vmap(grad(lambda b, *x: loss(b, *(t[None] for t in x))), (None, 0, 0, 0))(biases, phi_q, phi_k, v)
    for name, m, *each in zip(('table', *PrefixBias._fields), mapped, *per_item):
        assert_close(m, torch.stack(each), name)
    directions = [torch.randn_like(b) for b in biases]
    total = jvp(lambda *b: loss(b, phi_q, phi_k, v), tuple(biases), tuple(directions))[1]
    expected = sum((g * d).sum() for item in per_item for g, d in zip(item, directions))
    assert_close(total, expected)

    def numbers(*b):
        return loss(b, phi_q, phi_k, v)

    assert torch.autograd.gradgradcheck(numbers, tuple(leaves))


def test_float32_and_a_wide_bias():
    """Second derivatives where float32 weights would underflow: in float64, and finite."""
    case = make_case(grid_size=(3, 4), std=40.0).map(lambda t: t.float())
    function, (*others, bias) = as_function(case, 'auto')
    wide = case.map(lambda t: t.double())
    *wide_others, wide_bias = wide.tensors().values()
    expected = grad(lambda b: grad(lambda c: oracle(wide)(*wide_others, c).pow(3).sum())(b).square().sum())(wide_bias)
    actual = grad(lambda b: grad(lambda c: function(*others, c).pow(3).sum())(b).square().sum())(bias)
    assert actual.dtype == torch.float32 and actual.isfinite().all()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_a_wrong_rule_would_be_noticed():
    """Items folded into the batch have one bias gradient, their sum: the comparison above tells it from one each."""
    case = make('grid')
    function, (*tokens, bias) = as_function(case, 'direct')
    summed = grad(lambda b: function(*tokens, b).square().sum())(bias)
    each = vmap(lambda *x: grad(lambda b: function(*(t[None] for t in x), b).square().sum())(bias))(*tokens)
    assert_close(each.sum(0), summed)
    with pytest.raises(AssertionError):
        assert_close(each[0], summed)


@pytest.mark.parametrize('backend', ['flex', 'fused'])
def test_backends_that_are_none_of_our_products_refuse_by_name(backend, monkeypatch):
    from nprf_vit.ops import dispatch

    entry = dispatch.BACKENDS[backend]
    monkeypatch.setitem(dispatch.BACKENDS, backend, replace(entry, why_not=lambda case: None))
    function, (*others, bias) = as_function(make('grid'), backend)
    with pytest.raises(ValueError, match=f"backend '{backend}' has neither torch.func nor forward-mode derivatives"):
        grad(lambda b: function(*others, b).sum())(bias)


def test_second_derivatives_of_the_kernels_are_refused_by_name():
    fused_qkv = pytest.importorskip('nprf_vit.ops.backends.fused_qkv').fused_qkv
    with torch.device('meta'):
        qkv, w = torch.empty(2, 12, 3, 2, 8, requires_grad=True), torch.empty(2, 4, 8)
        bias = torch.empty(2, 5, 7, requires_grad=True)
        (first,) = torch.autograd.grad(fused_qkv(qkv, w, bias, None, 3, 4, False)[0].sum(), bias, create_graph=True)
        with pytest.raises(NotImplementedError, match="backend 'fused' has first derivatives only"):
            first.square().sum().backward()
