"""Tokens before the grid against the dense float64 oracle: forward, and the gradient of everything."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nprf_vit.ops import custom_op, kernel_attention, partial, prefix_attention, reference
from nprf_vit.ops.backends import batched_tiles
from nprf_vit.ops.bias import PrefixBias
from tests.fake_cuda import needs_fake_cuda

from .compare import GRADIENT_TOLERANCE, Case, assert_gradients, gradients, make_case, tolerance
from .host_reads import NoHostReads

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
GRIDS = {
    '5x6': {'grid_size': (5, 6)},
    '6x5': {'grid_size': (6, 5)},
    '1x1': {'grid_size': (1, 1)},
    '1x7': {'grid_size': (1, 7)},
    'sequence': {'n': 19},
}
# what each backend serves, by name
KINDS = [
    *[(backend, grid) for backend in ('auto', 'direct', 'fft') for grid in GRIDS],
    *[('linear', grid) for grid in ('5x6', 'sequence')],
    *[(backend, 'window') for backend in ('auto', 'window', 'direct', 'fft')],
    *[(backend, 'cells') for backend in ('auto', 'cells', 'direct')],
]


@dataclass
class Prefixed(Case):
    """A call of `prefix_attention`: the first P tokens have no position."""

    token_to_prefix: Tensor | None = None  # K, P
    prefix_to_token: Tensor | None = None  # K, P
    prefix_to_prefix: Tensor | None = None  # K, P, P

    @property
    def prefix_bias(self) -> PrefixBias:
        return PrefixBias(self.token_to_prefix, self.prefix_to_token, self.prefix_to_prefix)

    def grid_arguments(self) -> dict:
        return {name: getattr(self, name) for name in ('bias', 'far', 'grid_size', 'cells')}

    def run(self, backend='auto', **kwargs) -> Tensor:
        tensors = self.phi_q, self.phi_k, self.v
        return prefix_attention(*tensors, self.prefix_bias, **self.grid_arguments(), backend=backend, **kwargs)

    def weights(self) -> Tensor:
        p = self.token_to_prefix.shape[1]
        n = self.v.shape[2] - p
        if self.bias is None:
            matrix = self.v.new_zeros(self.v.shape[1], n, n)
        else:
            matrix = reference.dense_bias(self.bias, n, self.grid_size, self.far, self.cells)
        matrix = reference.prefixed_bias(matrix, *self.prefix_bias)
        return reference.matrix_attention_weights(self.phi_q, self.phi_k, matrix)

    def oracle(self) -> Tensor:
        return self.weights() @ self.v


def make(p=1, kind='5x6', std=0.5, prefix_std=1.0, dtype=torch.float32, seed=0, **kwargs) -> Prefixed:
    """A random call with p tokens before the grid."""
    if kind == 'window':
        shape = {'grid_size': (9, 10)}
    elif kind == 'cells':
        shape = {'grid_size': (7, 9), 'cells': (3, 4)}
    else:
        shape = GRIDS[kind]
    n = shape.get('n') or shape['grid_size'][0] * shape['grid_size'][1]
    grid = make_case(**shape, std=std, seed=seed, **kwargs)
    all_tokens = make_case(p + n, std=None, seed=seed + 1, **kwargs)
    generator = torch.Generator().manual_seed(seed + 2)
    heads = grid.v.shape[1]
    shapes = (heads, p), (heads, p), (heads, p, p)
    biases = [prefix_std * torch.randn(s, generator=generator).double() for s in shapes]
    bias, far = grid.bias, None
    if kind == 'window' and bias is not None:
        bias = bias[(slice(None), *(slice(s // 2 - 1, s // 2 + 2) for s in bias.shape[1:]))].contiguous()
        far = torch.randn(heads, generator=generator).double()
    tensors = all_tokens.phi_q, all_tokens.phi_k, all_tokens.v
    case = Prefixed(*tensors, bias, far, shape.get('grid_size'), False, shape.get('cells'), *biases)
    return case.map(lambda t: t.to(dtype))


def check_output(z: Tensor, case: Prefixed, tol: float) -> None:
    """|z - oracle| ≤ tol · Σ_j a_ij |v_j| on every element."""
    exact = case.map(lambda t: t.detach().double())
    a, v = exact.weights(), exact.v
    assert z.shape == v.shape
    terms = (tol * (a.abs() @ v.abs())).clamp_min(torch.finfo(torch.float32).tiny)
    excess = (z.detach().double() - a @ v).abs() / terms
    assert excess.max() <= 1, f'error {excess.max() * tol:.2e} of the terms of its element, allowed {tol:.0e}'


def check(case: Prefixed, backend='auto', forward_tol=None, gradient_tol=None, names=None, **kwargs) -> None:
    dtype = case.v.dtype
    exact = case.map(lambda t: t.detach().double())
    z = case.run(backend, **kwargs)
    assert z.dtype == dtype
    check_output(z, case, forward_tol or tolerance(backend, dtype))
    names = list(case.tensors()) if names is None else names
    cotangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    actual = gradients(lambda c: c.run(backend, **kwargs), case, cotangent, names)
    expected = gradients(lambda c: c.oracle(), exact, cotangent.double(), names)
    for name, g in actual.items():
        assert g.dtype == case.tensors()[name].dtype, f'gradient of {name} is {g.dtype}'
    assert_gradients(actual, expected, gradient_tol or GRADIENT_TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize(('backend', 'kind'), KINDS)
def test_backends(backend, kind, dtype):
    check(make(2, kind, std=None if backend == 'linear' else 0.5, dtype=dtype), backend)


@DTYPES
@pytest.mark.parametrize('p', [1, 3, 5])
def test_numbers_of_prefix_tokens(p, dtype):
    check(make(p, dtype=dtype))


@pytest.mark.parametrize('part', ['token_to_prefix', 'prefix_to_token', 'prefix_to_prefix', 'bias'])
def test_a_wrong_bias_is_noticed(part):
    """What the comparisons above compare with looks at every one of them."""
    case = make(2)
    values = getattr(case, part).clone()
    values.view(-1)[0] += 0.1
    wrong = replace(case, **{part: values})
    with pytest.raises(AssertionError, match='of the terms'):
        check_output(wrong.run(), case, 1e-3)


@DTYPES
@pytest.mark.parametrize('low', [False, True], ids=['+80', '-80'])
@pytest.mark.parametrize('part', ['token_to_prefix', 'prefix_to_token', 'prefix_to_prefix', 'bias'])
@pytest.mark.parametrize(
    ('backend', 'kind'), [('direct', '5x6'), ('auto', 'window'), ('auto', 'cells'), ('fft', '6x5')]
)
def test_wide_biases(backend, kind, part, low, dtype):
    """One kind of bias 80 above or below all others: nothing overflows, and what is left keeps its digits."""
    case = make(2, kind, dtype=dtype)
    check(replace(case, **{part: getattr(case, part) + (-80 if low else 80)}), backend)


@DTYPES
@pytest.mark.parametrize('shift', [10.0, 20.0, 40.0])
def test_gradients_of_a_prefix_that_takes_nearly_all(shift, dtype):
    """What is left of 1 - w is far below rounding: weights of e^-shift must keep their digits in gradients."""
    case = make(2, dtype=dtype)
    case.token_to_prefix[:, 0] += shift
    case.prefix_to_prefix[:, :, 1] += shift
    check(case)


@DTYPES
@pytest.mark.parametrize('std', [20.0, 80.0])
@pytest.mark.parametrize('kind', ['5x6', 'window', 'cells', 'sequence'])
def test_everything_wide(kind, std, dtype):
    # gradients of biases are down to 1e-12 of others: the oracle itself has four digits of them left
    check(make(3, kind, std=std, prefix_std=std, dtype=dtype), gradient_tol=1e-4 if dtype == torch.float64 else None)


@DTYPES
@pytest.mark.parametrize('kind', ['5x6', 'window', 'cells'])
@pytest.mark.parametrize('which', ['prefix', 'grid'])
@pytest.mark.parametrize('std', [0.5, 30.0])
def test_zero_features(kind, which, std, dtype):
    case = make(2, kind, std=std, prefix_std=std, dtype=dtype)
    where = slice(0, 1) if which == 'prefix' else slice(4, 7)
    case.phi_k[:, :, where] = 0
    check(case)


@DTYPES
@pytest.mark.parametrize('positive', [True, False], ids=['positive', 'signed'])
def test_a_zero_key_has_no_weight_under_any_bias(positive, dtype):
    case = make(2, dtype=dtype)
    case.phi_k[:, :, 0] = 0
    expected = case.run(positive=positive)
    case.token_to_prefix[:, 0] += 750
    case.prefix_to_prefix[:, :, 0] += 750
    leaves = case.map(lambda t: t.requires_grad_())
    z = leaves.run(positive=positive)
    torch.testing.assert_close(z, expected)
    unseen = replace(case, v=torch.zeros_like(case.v).index_fill_(2, torch.tensor(0), 1e30)).run(positive=positive)
    assert (unseen == 0).all()
    z.square().sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves.tensors().values())
    assert (leaves.token_to_prefix.grad[:, 0] == 0).all() and (leaves.prefix_to_prefix.grad[:, :, 0] == 0).all()


@pytest.mark.parametrize('positive', [True, False], ids=['positive', 'signed'])
def test_an_item_without_keys(positive):
    """Neither on the grid nor before it: the output is zero, and the other item has its gradients."""
    case = make(2)
    case.phi_k[0] = 0
    leaves = case.map(lambda t: t.detach().requires_grad_())
    z = leaves.run(positive=positive)
    assert (z[0] == 0).all()
    z.square().sum().backward()
    alone = case.map(lambda t: (t[1:] if t.dim() == 4 and t.shape[0] == 2 else t).detach().requires_grad_())
    alone.run(positive=positive).square().sum().backward()
    for name in ('bias', 'token_to_prefix', 'prefix_to_token', 'prefix_to_prefix'):
        torch.testing.assert_close(getattr(leaves, name).grad, getattr(alone, name).grad)
    assert all((x.grad[0] == 0).all() for x in (leaves.phi_q, leaves.v))


@pytest.mark.parametrize('kind', ['5x6', 'window', 'cells', 'sequence'])
@pytest.mark.parametrize('half', [torch.float16, torch.bfloat16])
def test_half_precision_values(half, kind):
    """Values in half precision beside float32 features: sums are float32's, the output is rounded once."""
    case = make(2, kind)
    case.v = case.v.to(half)
    z = case.run()
    assert z.dtype == half
    check_output(z, case, 4 * torch.finfo(half).eps)


@pytest.mark.parametrize('kind', ['5x6', 'window', 'cells'])
def test_signed_features(kind):
    case = make(2, kind, dtype=torch.float64, m=64)
    for phi in (case.phi_q, case.phi_k):
        phi[..., 0] = -0.1 * phi[..., 0]
    check(case, positive=False)


def test_features_of_any_size():
    """A factor per query cancels, and one common to all keys: products of both are far below float32."""
    case = make(2, dtype=torch.float64)
    expected = case.run()
    small = replace(case, phi_q=case.phi_q * 1e-32, phi_k=case.phi_k * 1e-30).map(torch.Tensor.float)
    torch.testing.assert_close(small.run().double(), expected, rtol=1e-4, atol=1e-5)
    check(small, names=['v', 'bias', 'token_to_prefix', 'prefix_to_token', 'prefix_to_prefix'])


def test_queries_without_features_give_zero():
    case = make(2)
    case.phi_q[:, :, [0, 5]] = 0
    leaves = case.map(lambda t: t.requires_grad_())
    z = leaves.run()
    assert (z[:, :, [0, 5]] == 0).all()
    assert z[:, :, [1, 4]].abs().min() > 0
    z.square().sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves.tensors().values())


def test_no_bias_at_all_is_attention_among_all_tokens():
    case = make(3, std=None, prefix_std=0.0, dtype=torch.float64)
    expected = kernel_attention(case.phi_q, case.phi_k, case.v)
    torch.testing.assert_close(case.run(), expected)


@pytest.fixture
def on_an_accelerator(monkeypatch):
    """CPU tensors take the path of every other device; windows as small as the tests' have tiles."""
    monkeypatch.setattr(custom_op, '_is_batched', lambda v, backend: True)
    monkeypatch.setattr(batched_tiles, '_SIDE', 2)


@pytest.mark.parametrize('kind', ['5x6', '1x1', 'window', 'cells', 'sequence', 'none'])
def test_nothing_is_read_on_the_host(kind, on_an_accelerator):
    case = make(2, '5x6' if kind == 'none' else kind, std=None if kind == 'none' else 0.5)
    leaves = case.map(lambda t: t.detach().requires_grad_())
    if kind != 'cells':  # it asks its tensors where they are
        with NoHostReads() as mode:
            leaves.run().square().sum().backward()
        assert {'attend_partial', 'attend', 'attend_backward'} <= set(mode.seen)
    check(case)


@needs_fake_cuda
@pytest.mark.parametrize('kind', ['5x6', 'window', 'cells'])
@pytest.mark.parametrize('backend', ['auto', 'direct'])
def test_on_fake_cuda_tensors(backend, kind):
    case = make(2, kind)
    with FakeTensorMode(), NoHostReads():
        fake = case.map(lambda t: torch.empty(t.shape, device='cuda'))
        assert fake.run(backend).device.type == 'cuda'


@pytest.mark.parametrize('kind', ['5x6', 'window'])
def test_opcheck(kind):
    case = make(1, kind)
    bias = case.bias.requires_grad_()
    far = None if case.far is None else case.far.requires_grad_()
    tensors = [x[:, :, 1:].clone().requires_grad_() for x in (case.phi_q, case.phi_k, case.v)]
    torch.library.opcheck(partial.attend_partial, (*tensors, bias, far, *case.grid_size, True, 'direct'))


def test_compiled():
    case = make(2, 'window')
    compiled = torch.compile(lambda c: c.run(), fullgraph=True, backend='aot_eager')
    cotangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(1))
    names = list(case.tensors())
    actual, expected = (gradients(f, case, cotangent, names) for f in (compiled, lambda c: c.run()))
    for name in names:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)


def test_autocast_changes_nothing():
    case = make(2)
    with torch.autocast('cpu', torch.bfloat16):
        z = case.run()
    assert torch.equal(z, case.run())


def test_errors():
    case = make(2)
    with pytest.raises(ValueError, match=r'token_to_prefix \(2, 1\): expected \(2, 2\) for 2 heads and 2 prefix'):
        replace(case, token_to_prefix=case.token_to_prefix[:, :1]).run()
    with pytest.raises(ValueError, match='prefix_to_token is torch.float64 on cpu: expected torch.float32'):
        replace(case, prefix_to_token=case.prefix_to_token.double()).run()
    with pytest.raises(ValueError, match='holds 30 tokens, phi_q and v have 29'):
        case.map(lambda t: t[:, :, :31] if t.dim() == 4 else t).run()
    with pytest.raises(ValueError, match='32 prefix tokens of 32 tokens'):
        many = {'token_to_prefix': torch.zeros(2, 32), 'prefix_to_token': torch.zeros(2, 32)}
        replace(case, **many, prefix_to_prefix=torch.zeros(2, 32, 32)).run()
    with pytest.raises(ValueError, match="backend 'step' cannot serve"):
        case.run('step')
