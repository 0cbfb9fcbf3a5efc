"""Attention in plain operators: each algorithm against the dense float64 oracle, and against the op."""

# B batch, N tokens, K heads, M features, D head dim, P prefix tokens
from dataclasses import replace
from functools import partial

import pytest
import torch

from nprf_vit.ops import draw_projection, feature_map, kernel_attention, prefix_attention, reference
from nprf_vit.ops.bias import PrefixBias
from nprf_vit.ops.plain import attention, plain_attention, plain_prefix_attention

from . import test_key_mask as key_masks
from .compare import GRADIENT_TOLERANCE, assert_gradients, assert_output, gradients, make_case

BY_NAME = {algorithm.name: algorithm for algorithm in attention.ALGORITHMS}
# no FFT: sums in float32 round as those of `direct`, whose tolerance is this one
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
WIDE = 80.0
GRIDS = [(1, 1), (1, 5), (5, 1), (3, 2), (7, 14), (11, 13)]


def windowed(case, rows, cols, far=(0.3, -0.2)):
    """The case with the central (2·rows+1)×(2·cols+1) biases of its table, and a constant beyond."""
    sizes = (rows, cols)[-(case.bias.dim() - 1) :]
    start = [max(0, s // 2 - r) for s, r in zip(case.bias.shape[1:], sizes)]
    where = tuple(slice(a, s - a) for a, s in zip(start, case.bias.shape[1:]))
    return replace(
        case, bias=case.bias[(slice(None), *where)].contiguous(), far=case.v.new_tensor(far)[: case.v.shape[1]]
    )


CASES = {
    **{f'dense {h}x{w}': ('dense', {'grid_size': (h, w)}) for h, w in GRIDS},
    'dense sequence': ('dense', {'n': 17}),
    'dense causal': ('dense', {'n': 17, 'causal': True}),
    'dense cells': ('dense', {'grid_size': (7, 5), 'cells': (3, 2)}),
    'linear': ('linear', {'n': 13, 'std': None}),
    'linear of one': ('linear', {'n': 1, 'std': None}),
    'linear causal': ('linear', {'n': 13, 'std': None, 'causal': True}),
    'linear causal in chunks': ('linear', {'n': 131, 'std': None, 'causal': True}),
    'cells, even': ('cells', {'grid_size': (6, 4), 'cells': (3, 2)}),
    'cells, prime': ('cells', {'grid_size': (7, 11), 'cells': (3, 4)}),
    'cells, one': ('cells', {'grid_size': (5, 3), 'cells': (1, 1)}),
    'cells, one per token': ('cells', {'grid_size': (3, 5), 'cells': (3, 5)}),
    'cells of a sequence': ('cells', {'n': 23, 'cells': 5}),
    'cells 1x1': ('cells', {'grid_size': (1, 1), 'cells': (1, 1)}),
    **{f'window {h}x{w}': ('window', {'grid_size': (h, w), 'window': (1, 2)}) for h, w in GRIDS},
    'window, several tiles': ('window', {'grid_size': (19, 23), 'window': (2, 1)}),
    'window, two tiles to a side': ('window', {'grid_size': (29, 23), 'window': (11, 9)}),
    'window without radius': ('window', {'grid_size': (9, 14), 'window': (0, 0)}),
    'window of a sequence': ('window', {'n': 300, 'window': (0, 5)}),
    'window of a long sequence': ('window', {'n': 700, 'window': (0, 150)}),
    'window, causal': ('window', {'n': 300, 'window': (0, 5), 'causal': True}),
    'window, causal and long': ('window', {'n': 700, 'window': (0, 150), 'causal': True}),
}


def make(kind, dtype, **more):
    name, options = CASES[kind]
    options = {'dtype': dtype, **options, **more}
    window = options.pop('window', None)
    case = make_case(**options)
    return name, case if window is None else windowed(case, *window)


def run(case, **kwargs):
    return plain_attention(**case.arguments(), **kwargs)


@pytest.fixture
def only(monkeypatch):
    """Lets one algorithm run, whatever it costs."""

    def choose(name):
        monkeypatch.setattr(attention, 'choose', lambda call: BY_NAME[name])

    return choose


def check(case, dtype, forward=run):
    assert_output(forward(case), case, TOLERANCE[dtype])
    cotangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    names = list(case.tensors())
    actual = gradients(forward, case, cotangent, names)
    exact = case.map(lambda t: t.double())
    oracle = gradients(lambda c: reference.attention(**c.arguments()), exact, cotangent.double(), names)
    assert_gradients(actual, oracle, GRADIENT_TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize('kind', CASES)
def test_algorithm(kind, dtype, only):
    name, case = make(kind, dtype)
    only(name)
    check(case, dtype)


@pytest.mark.parametrize('kind', [kind for kind in CASES if not kind.startswith('linear')])
def test_wide_biases(kind, only):
    name, case = make(kind, torch.float32)
    only(name)
    generator = torch.Generator().manual_seed(2)
    signs = torch.randint(2, case.bias.shape, generator=generator) * 2 - 1
    for far in (-WIDE, WIDE):
        wide = replace(case, bias=WIDE * signs.float(), far=None if case.far is None else torch.tensor([far, -far]))
        assert_output(run(wide), wide, TOLERANCE[torch.float32])


@pytest.mark.parametrize('flip', ['bias', 'v'])
def test_a_wrong_answer_is_noticed(flip):
    case = make_case(grid_size=(3, 4), dtype=torch.float32)
    wrong = replace(case, **{flip: getattr(case, flip).flip(-1)})
    with pytest.raises(AssertionError, match='of the terms of its element'):
        assert_output(run(wrong), case, TOLERANCE[torch.float32])


@DTYPES
@pytest.mark.parametrize('kind', key_masks.SERVED['direct'])
def test_key_mask(kind, dtype, only):
    case, mask = key_masks.case_of(kind, dtype), key_masks.masks(key_masks.LENGTH)
    names = {'window': ('window', 'dense'), 'cells': ('cells', 'dense')}
    for name in names.get(kind, ('linear',) if case.bias is None else ('dense',)):
        only(name)
        masked = partial(run, key_mask=mask)
        key_masks.check(case, mask, masked, TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype])


@pytest.mark.parametrize('kind', key_masks.SERVED['direct'])
def test_no_key_at_all(kind):
    case = key_masks.case_of(kind, torch.float32)
    mask = torch.zeros(3, key_masks.LENGTH, dtype=torch.bool)
    mask[2, 4:] = True  # causal: the first four see nothing
    leaves = {name: t.clone().requires_grad_() for name, t in case.tensors().items()}
    z = run(replace(case, **leaves), key_mask=mask)
    z.square().sum().backward()
    assert (z[:2] == 0).all() and z[2, :, 4:].ne(0).all()
    assert (z[2, :, :4] == 0).all() == case.causal
    for name, leaf in leaves.items():
        assert leaf.grad.isfinite().all(), name
        assert leaf.dim() < 4 or (leaf.grad[:2] == 0).all(), name


@pytest.mark.parametrize('kind', ['dense', 'cells', 'window'])
def test_a_masked_key_with_a_large_bias_costs_the_others_nothing(kind, only):
    """Biases of 300 lie on keys that are masked: had rows measured theirs from it, nothing would be left."""
    only(kind)
    case = make_case(grid_size=(9, 10), cells=(9, 10) if kind == 'cells' else None, dtype=torch.float32)
    case = windowed(case, 2, 2) if kind == 'window' else case
    mask = torch.ones(2, 9, 10, dtype=torch.bool)
    mask[:, :, 1::2] = False
    centre = case.bias.shape[2] // 2
    odd = (torch.arange(case.bias.shape[2]) - centre) % 2 == 1
    steep = replace(case, bias=case.bias.masked_fill(odd, 300.0))
    z = run(steep, key_mask=mask.flatten(1)).unflatten(2, (9, 10))[:, :, :, ::2]
    exact = steep.map(lambda t: t.double())
    expected = reference.attention(**exact.arguments(), key_mask=mask.flatten(1)).unflatten(2, (9, 10))[:, :, :, ::2]
    torch.testing.assert_close(z, expected.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('scale', [1e-30, 1e30])
def test_features_of_any_size(scale):
    case = make_case(grid_size=(3, 4), dtype=torch.float32)
    sized = replace(case, phi_q=case.phi_q * scale, phi_k=case.phi_k * scale)
    torch.testing.assert_close(run(sized), run(case))


def test_zero_features_give_zeros():
    case = make_case(grid_size=(3, 4), dtype=torch.float32)
    for positive in (True, False):
        z = run(replace(case, phi_q=torch.zeros_like(case.phi_q)), positive=positive)
        assert (z == 0).all()


@pytest.mark.parametrize('causal', [False, True])
def test_signed_features(causal):
    case = make_case(n=12, causal=causal, kind='trf', m=64, d=8)
    torch.testing.assert_close(run(case, positive=False), case.run('direct', positive=False))


def test_causal_never_looks_ahead():
    for kind in ('dense causal', 'linear causal in chunks', 'window, causal'):
        _, case = make(kind, torch.float32)
        t = case.v.shape[2] // 2
        later = (torch.arange(case.v.shape[2]) >= t)[:, None]
        other = replace(case, **{n: torch.where(later, 7 * getattr(case, n), getattr(case, n)) for n in ('phi_k', 'v')})
        assert torch.equal(run(other)[:, :, :t], run(case)[:, :, :t]), kind


def test_more_keys_than_queries():
    q, k, v = torch.rand(2, 3, 5, 8), torch.rand(2, 3, 9, 8), torch.randn(2, 3, 9, 4)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    torch.testing.assert_close(plain_attention(q, k, v, key_mask=mask), kernel_attention(q, k, v, key_mask=mask))


@pytest.mark.parametrize('kind', [None, 'window', 'cells', 'none'])
def test_half_precision_values_and_autocast(kind):
    options = {None: {}, 'window': {}, 'cells': {'cells': (2, 3)}, 'none': {'std': None}}[kind]
    case = make_case(grid_size=(6, 9), dtype=torch.float32, **options)
    case = windowed(case, 1, 1) if kind == 'window' else case
    case = replace(case, v=case.v.bfloat16())
    with torch.autocast('cpu', torch.bfloat16):
        z = run(case)
    assert z.dtype == torch.bfloat16
    assert torch.equal(z, run(case))
    torch.testing.assert_close(z, case.run())


def prefixed(kind, dtype):
    options = {
        'dense': {'grid_size': (5, 6)},
        'sequence': {'n': 19},
        'linear': {'grid_size': (5, 6), 'std': None},
        'cells': {'grid_size': (5, 6), 'cells': (2, 3)},
        'window': {'grid_size': (9, 12)},
    }[kind]
    case = make_case(**options, dtype=dtype)
    return windowed(case, 1, 1) if kind == 'window' else case


@DTYPES
@pytest.mark.parametrize('wide', [False, True])
@pytest.mark.parametrize('kind', ['dense', 'sequence', 'linear', 'cells', 'window'])
def test_prefix(kind, wide, dtype):
    p, case = 3, prefixed(kind, dtype)
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(2, 2, 2, p, case.phi_q.shape[-1], generator=generator, dtype=dtype)
    v = torch.randn(2, 2, p, case.v.shape[-1], generator=generator, dtype=dtype)
    full = [torch.cat(pair, dim=2) for pair in zip((*x, v), (case.phi_q, case.phi_k, case.v))]
    scale = 40.0 if wide else 0.7
    biases = [scale * torch.randn(s, generator=generator, dtype=dtype) for s in ((2, p), (2, p), (2, p, p))]
    grid = {name: getattr(case, name) for name in ('bias', 'far', 'grid_size', 'cells')}
    if wide and case.bias is not None:
        grid['bias'] = grid['bias'] * 60
    names = [name for name in ('bias', 'far') if grid[name] is not None]

    def leaves():
        tensors = [t.clone().requires_grad_() for t in (*full, *biases, *(grid[name] for name in names))]
        return tensors, {**grid, **dict(zip(names, tensors[6:]))}

    results = []
    for function in (plain_prefix_attention, prefix_attention):
        tensors, options = leaves()
        z = function(*tensors[:3], PrefixBias(*tensors[3:6]), **options)
        z.square().sum().backward()
        results.append([z.detach(), *(t.grad for t in tensors)])
    tolerance = {'atol': 1e-4, 'rtol': 1e-3} if dtype == torch.float32 else {'atol': 1e-8, 'rtol': 1e-6}
    for got, expected in zip(*results):
        assert got.isfinite().all()
        largest = expected.abs().max().clamp(min=1)
        torch.testing.assert_close(got / largest, expected / largest, **tolerance)


@pytest.mark.parametrize('kind', ['dense', 'sequence', 'linear', 'cells', 'window'])
def test_prefix_with_masked_keys(kind):
    """Against the same tokens without the masked ones' weight: features of zero, which the op leaves out."""
    p, case = 2, prefixed(kind, torch.float64)
    n = case.v.shape[2] + p
    generator = torch.Generator().manual_seed(6)
    phi_q, phi_k = torch.rand(2, 2, 2, n, 6, generator=generator, dtype=torch.float64)
    v = torch.randn(2, 2, n, 3, generator=generator, dtype=torch.float64)
    prefix = PrefixBias(
        *(torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, p), (2, p), (2, p, p)))
    )
    mask = torch.rand(2, n, generator=generator) < 0.6
    mask[0, 0] = False
    mask[1, p:] = False  # nothing on the grid
    mask[1, 1] = True
    grid = {name: getattr(case, name) for name in ('bias', 'far', 'grid_size', 'cells')}
    hidden = ~mask[:, None, :, None]
    poisoned = phi_q, phi_k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf)
    z = plain_prefix_attention(*poisoned, prefix, **grid, key_mask=mask)
    expected = prefix_attention(phi_q, phi_k.masked_fill(hidden, 0), v.masked_fill(hidden, 0), prefix, **grid)
    torch.testing.assert_close(z, expected, atol=1e-8, rtol=1e-8)


def test_a_wrong_prefix_is_noticed():
    case = prefixed('dense', torch.float64)
    tensors = case.phi_q, case.phi_k, case.v
    grid = {'bias': torch.randn(2, 57, dtype=torch.float64)[:, :57]}
    prefix = PrefixBias(*(torch.randn(s, dtype=torch.float64) for s in ((2, 1), (2, 1), (2, 1, 1))))
    z = plain_prefix_attention(*tensors, prefix, **grid)
    torch.testing.assert_close(z, prefix_attention(*tensors, prefix, **grid))
    other = prefix._replace(token_to_prefix=prefix.prefix_to_token, prefix_to_token=prefix.token_to_prefix)
    assert not torch.allclose(plain_prefix_attention(*tensors, other, **grid), z)


def test_choice_follows_the_counts():
    def chosen(case):
        call = attention.Call(
            case.phi_q,
            case.phi_k,
            attention.with_ones(case.v),
            attention._upright(case.bias, case.far, case.grid_size, case.cells, case.v.dtype),
            attention._grid(case.grid_size, case.v.shape[2]),
            case.causal,
        )
        return attention.choose(call).name

    assert chosen(make_case(n=5, std=None)) == 'linear'
    assert chosen(make_case(n=5, std=None, causal=True)) == 'linear'
    assert chosen(make_case(grid_size=(30, 30))) == 'dense'
    assert chosen(make_case(grid_size=(30, 30), cells=(2, 2))) == 'cells'
    assert chosen(make_case(grid_size=(3, 3), cells=(2, 2))) == 'dense'
    assert chosen(windowed(make_case(grid_size=(30, 30)), 1, 1)) == 'window'
    assert chosen(windowed(make_case(grid_size=(4, 4)), 2, 2)) == 'dense'


@pytest.mark.parametrize('kind', ['dense 3x2', 'linear', 'cells, prime', 'window, several tiles', 'dense causal'])
def test_second_derivatives_and_forward_mode(kind):
    name, case = make(kind, torch.float64, batch=1, heads=1, m=3, d=2)
    tensors = case.tensors()

    def function(*leaves):
        return run(replace(case, **dict(zip(tensors, leaves)))).sum()

    values = tuple(tensors.values())
    tangents = tuple(torch.randn_like(t) for t in values)
    _, hvp = torch.autograd.functional.hvp(function, values, tangents)
    _, by_jvp = torch.func.jvp(torch.func.grad(function, argnums=tuple(range(len(values)))), values, tangents)
    for a, b in zip(hvp, by_jvp):
        torch.testing.assert_close(a, b)
    step = 1e-5
    moved = [tuple(t + s * step * d for t, d in zip(values, tangents)) for s in (1, -1)]
    up, down = (torch.func.grad(function, argnums=tuple(range(len(values))))(*m) for m in moved)
    for a, b, c in zip(hvp, up, down):
        torch.testing.assert_close(a, (b - c) / (2 * step), atol=1e-5, rtol=1e-4)


def test_features_that_are_not_normalized():
    x, w = 3 * torch.randn(2, 2, 3, 20, 8), draw_projection(3, 16, 8)
    phi_q, phi_k = (feature_map(y, w, role=role) for y, role in zip(x, ('query', 'key')))
    v, bias = torch.randn(2, 3, 20, 5), torch.randn(3, 7, 9)
    expected = kernel_attention(phi_q, phi_k, v, bias, grid_size=(4, 5))
    torch.testing.assert_close(plain_attention(phi_q, phi_k, v, bias, grid_size=(4, 5)), expected, atol=1e-4, rtol=1e-4)


def test_empty_batch():
    case = make_case(grid_size=(3, 4), dtype=torch.float32)
    for other in (
        case,
        windowed(case, 1, 1),
        replace(case, bias=None),
        replace(case, bias=case.bias[:, :3, :3], cells=(2, 2)),
    ):
        none = replace(other, phi_q=case.phi_q[:0], phi_k=case.phi_k[:0], v=case.v[:0])
        assert run(none).shape == (0, 2, 12, 3)
