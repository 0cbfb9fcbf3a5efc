"""Cross attention: more or fewer keys than queries, by two algorithms, against the oracle."""

# B batch, K heads, N queries, L keys, M features, D head dim
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from nprf_vit.ops import DecodeState, kernel_attention, reference
from nprf_vit.ops.backends import batched, direct_cross
from nprf_vit.ops.backends.flex import flex_attention
from nprf_vit.ops.backends.interface import Case
from nprf_vit.ops.dispatch import choose
from tests.fake_cuda import needs_fake_cuda

SIZES = [(7, 12), (12, 7), (1, 9), (9, 1), (300, 5)]


def tensors(n, keys, dtype=torch.float64, batch=2, heads=3, m=6, d=4):
    g = torch.Generator().manual_seed(n * keys)
    phi_q = torch.rand(batch, heads, n, m, generator=g, dtype=torch.float64) + 0.1
    phi_k = torch.rand(batch, heads, keys, m, generator=g, dtype=torch.float64) + 0.1
    v = torch.randn(batch, heads, keys, d, generator=g, dtype=torch.float64)
    mask = torch.rand(batch, keys, generator=g) < 0.7
    mask[:, 0] = True
    return [x.to(dtype) for x in (phi_q, phi_k, v)], mask


def with_gradients(function, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    z = function(*leaves)
    cotangent = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(z.dtype)
    return z.detach(), *torch.autograd.grad(z, leaves, cotangent)


@pytest.mark.parametrize('backend', ['linear', 'direct', 'auto'])
@pytest.mark.parametrize(('n', 'keys'), SIZES)
@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_against_the_oracle(backend, n, keys, masked, dtype, monkeypatch):
    monkeypatch.setattr(direct_cross, '_TILE', 200)
    inputs, mask = tensors(n, keys, dtype)
    mask = mask if masked else None
    actual = with_gradients(lambda *x: kernel_attention(*x, backend=backend, key_mask=mask), inputs)
    exact = with_gradients(lambda *x: reference.attention(*x, key_mask=mask), [x.double() for x in inputs])
    tol = {'rtol': 1e-9, 'atol': 1e-11} if dtype == torch.float64 else {'rtol': 1e-3, 'atol': 1e-4}
    for a, b in zip(actual, exact):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, **tol)


@pytest.mark.parametrize('backend', ['linear', 'direct'])
def test_signed_features_and_items_without_keys(backend):
    inputs, mask = tensors(7, 12)
    inputs[0][..., 0] *= -0.3
    mask[0] = False
    for function in (
        lambda *x: kernel_attention(*x, backend=backend, key_mask=mask, positive=False),
        lambda *x: kernel_attention(x[0].abs(), *x[1:], backend=backend, key_mask=mask),
    ):
        actual = with_gradients(function, inputs)
        assert all(x.isfinite().all() and (x[0] == 0).all() for x in actual)


def test_small_sums_are_repeated_in_float64():
    inputs, _ = tensors(7, 12, torch.float32)
    small = [inputs[0] * 1e-20, inputs[1] * 1e-20, inputs[2]]
    torch.testing.assert_close(kernel_attention(*small), kernel_attention(*inputs), rtol=1e-4, atol=1e-5)


def test_half_precision_values():
    (phi_q, phi_k, v), _ = tensors(7, 12, torch.float32)
    z = kernel_attention(phi_q, phi_k, v.bfloat16())
    assert z.dtype == torch.bfloat16 and z.shape == (2, 3, 7, 4)


def test_a_wrong_pairing_is_noticed():
    (phi_q, phi_k, v), _ = tensors(7, 12)
    assert not torch.allclose(kernel_attention(phi_q, phi_k, v.flip(2)), reference.attention(phi_q, phi_k, v))


def test_as_many_keys_as_queries_is_what_it_was():
    (phi_q, phi_k, v), _ = tensors(7, 7, torch.float32)
    assert torch.equal(kernel_attention(phi_q, phi_k, v), kernel_attention(phi_q, phi_k, v, grid_size=(1, 7)))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'bias': torch.zeros(3, 13)}, r'bias.*\(2, 3, 7, 6\).*\(2, 3, 12, 6\).*different length.*bias=None'),
        ({'bias': torch.zeros(3, 3), 'far': torch.zeros(3)}, 'bias.*different length'),
        ({'causal': True}, 'causal.*different length.*causal=False'),
        ({'grid_size': (1, 7)}, 'grid_size.*different length'),
        ({'key_mask': torch.ones(2, 7, dtype=torch.bool)}, r'key_mask \(2, 7\).*\(2, 12\)'),
        ({'backend': 'fft'}, "'fft' cannot serve.*7 queries and 12 keys.*direct"),
        ({'backend': 'step'}, "'step' cannot serve"),
        ({'backend': 'window'}, "'window' cannot serve"),
        ({'backend': 'fused'}, "'fused' cannot serve"),
    ],
)
def test_errors(options, message):
    inputs, _ = tensors(7, 12, torch.float32)
    with pytest.raises(ValueError, match=message):
        kernel_attention(*inputs, **options)


def test_values_belong_to_keys():
    (phi_q, phi_k, v), _ = tensors(7, 12)
    with pytest.raises(ValueError, match=r'tokens of phi_k and v.*v \(2, 3, 7, 4\)'):
        kernel_attention(phi_q, phi_k, v[:, :, :7])


@needs_fake_cuda
def test_on_cuda_it_is_linear():
    case = Case((1, 7), 6, 4, has_bias=False, device='cuda', keys=12)
    assert choose(case).name == 'linear'
    with FakeTensorMode():
        phi_q, phi_k = (torch.empty(2, 3, n, 6, device='cuda') for n in (7, 12))
        v = torch.empty(2, 3, 12, 4, device='cuda')
        assert kernel_attention(phi_q, phi_k, v).shape == (2, 3, 7, 4)
        z, den = batched.attend(phi_q, phi_k, v, None, None, (1, 7), False, True)
        grads = batched.attend_backward(phi_q, phi_k, v, None, None, z, den, z, (1, 7), False, False)
        assert [g.shape for g in grads[:3]] == [phi_q.shape, phi_k.shape, v.shape]


@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
def test_flex():
    (phi_q, phi_k, v), _ = tensors(7, 12, torch.float32, m=16, d=16)
    z = flex_attention(phi_q, phi_k, v, None, (1, 7), False, compiled=False)
    torch.testing.assert_close(z, kernel_attention(phi_q, phi_k, v), rtol=1e-4, atol=1e-5)


def test_compiled_and_counted():
    (phi_q, phi_k, v), _ = tensors(7, 12, torch.float32)
    z = torch.compile(kernel_attention, backend='aot_eager', fullgraph=True)(phi_q.requires_grad_(), phi_k, v)
    torch.testing.assert_close(z, kernel_attention(phi_q, phi_k, v))
    with FlopCounterMode(display=False) as counter:
        kernel_attention(phi_q, phi_k, v).sum().backward()
    forward, backward = (7 + 12) * 6 * 5, (2 * 7 + 3 * 12) * 6 * 5
    assert counter.get_total_flops() == 2 * 2 * 3 * (forward + backward)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize('positive', [True, False])
def test_a_state_of_all_keys(dtype, positive):
    """Built once, queried token by token."""
    (phi_q, phi_k, v), mask = tensors(7, 12, torch.float32 if dtype == torch.bfloat16 else dtype)
    mask[1] = False
    v = v.to(dtype).masked_fill(~mask[:, None, :, None], torch.nan)
    state = DecodeState.of_keys(phi_k, v, mask, positive)
    steps = torch.stack([state.query(phi_q[:, :, t]) for t in range(7)], dim=2)
    assert steps.dtype == dtype and (steps[1] == 0).all() and state.length == 12
    torch.testing.assert_close(steps, kernel_attention(phi_q, phi_k, v, key_mask=mask, positive=positive))


def test_a_state_of_all_keys_takes_more():
    """A prompt at once, then token by token: causal attention without a bias."""
    (phi_q, phi_k, v), _ = tensors(9, 9)
    expected = kernel_attention(phi_q, phi_k, v, causal=True)
    state = DecodeState.of_keys(phi_k[:, :, :5], v[:, :, :5])
    for t in range(5, 9):
        z = state.step(*(x[:, :, t] for x in (phi_q, phi_k, v)))
        torch.testing.assert_close(z, expected[:, :, t])


def test_bad_queries_of_a_state():
    (phi_q, phi_k, v), _ = tensors(7, 12)
    with pytest.raises(ValueError, match='no key'):
        DecodeState().query(phi_q[:, :, 0])
    with pytest.raises(ValueError, match='bias'):
        state = DecodeState(torch.zeros(3, 9, dtype=torch.float64))
        state.step(phi_q[:, :, 0], phi_k[:, :, 0], v[:, :, 0])
        state.query(phi_q[:, :, 0])
    with pytest.raises(ValueError, match=r'\(2, 3, 7, 6\).*\(2, 3, 6\)'):
        DecodeState.of_keys(phi_k, v).query(phi_q)
    with pytest.raises(ValueError, match='phi_k is the numpy.ndarray: expected a torch.Tensor'):
        DecodeState.of_keys(phi_k.numpy(), v)
    with pytest.raises(ValueError, match='phi_q is the numpy.ndarray: expected a torch.Tensor'):
        DecodeState.of_keys(phi_k, v).query(phi_q[:, :, 0].numpy())
    with pytest.raises(ValueError, match=r'v \(2, 3, 5, 4\)'):
        DecodeState.of_keys(phi_k, v[:, :, :5])
