"""Denominators too small for float32, and rows that see no key at all: values, gradients, and the rows beside them."""

import pytest
import torch

from nprf_vit.ops import kernel_attention

from .compare import make_case


def features(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def call(phi_q, phi_k, v, bias, causal=True, backend='direct'):
    leaves = [x.detach().requires_grad_() for x in (phi_q, phi_k, v, bias) if x is not None]
    z = kernel_attention(*leaves, causal=causal, backend=backend)
    return z, torch.autograd.grad(z.sum() + z[0].square().sum(), leaves)


@pytest.mark.parametrize(('backend', 'biased'), [('direct', True), ('direct', False), ('fft', True), ('linear', False)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
def test_rows_without_keys_are_zero_and_have_no_gradient(backend, biased, dtype):
    phi_q, phi_k, v = features(2, 1, 7, 4), features(2, 1, 7, 4, seed=1), torch.randn(2, 1, 7, 3)
    phi_k[0, :, :3] = 0  # the first three tokens of one item see nothing
    bias = torch.randn(1, 13) if biased else None
    phi_q, phi_k, v, bias = (None if x is None else x.to(dtype) for x in (phi_q, phi_k, v, bias))
    z, grads = call(phi_q, phi_k, v, bias, backend=backend)
    assert (z[0, :, :3] == 0).all()
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0, :, :3] == 0).all()
    # the rows that do see keys, alone: the same gradients
    tail = [x[:, :, 3:].clone() for x in (phi_q, phi_k, v)]
    _, expected = call(*[x[:1] for x in tail], None if bias is None else bias[:, 3:-3].clone(), backend=backend)
    for g, e in zip(grads[:3], expected[:3]):
        torch.testing.assert_close(g[:1, :, 3:], e, rtol=2e-3, atol=1e-5)


def test_a_nan_in_one_item_leaves_the_rescue_of_another_on():
    phi_q, phi_k, v = features(2, 1, 5, 4), features(2, 1, 5, 4, seed=1), torch.randn(2, 1, 5, 3)
    _, expected = call(phi_q[1:], phi_k[1:], v[1:], None)
    phi_q[1], phi_k[1] = phi_q[1] * 1e-20, phi_k[1] * 1e-20
    phi_q[0, 0, 2] = float('nan')
    leaves = [x.requires_grad_() for x in (phi_q, phi_k, v)]
    z = kernel_attention(*leaves, causal=True, backend='direct')[1:]
    grads = torch.autograd.grad(z.sum() + z[0].square().sum(), leaves)
    assert all(g[1].isfinite().all() for g in grads)
    torch.testing.assert_close(grads[2][1], expected[2][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[0][1] * 1e-20, expected[0][0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('biased', [False, True])
def test_step_rescues_small_denominators(biased):
    """A constant v gives itself back, whatever the scale of the features."""
    small = features(2, 1, 5, 4) * 1e-20
    bias = torch.randn(1, 9, generator=torch.Generator().manual_seed(0)) if biased else None
    z = kernel_attention(small, small, torch.ones(2, 1, 5, 3), bias, causal=True, backend='step')
    torch.testing.assert_close(z, torch.ones_like(z), rtol=1e-6, atol=0)


@pytest.mark.parametrize('steep', [100.0, 400.0])
def test_step_weighs_a_steep_bias_beyond_float32(steep):
    """The newest key has zero features and the largest bias: the others decide among themselves."""
    phi_q, phi_k, v = features(1, 1, 6, 4), features(1, 1, 6, 4, seed=1), torch.randn(1, 1, 6, 3)
    phi_k[:, :, -1] = 0
    bias = torch.randn(1, 11, generator=torch.Generator().manual_seed(0))
    shifted = bias.clone()
    shifted[:, 5] += steep
    z, expected = (kernel_attention(phi_q, phi_k, v, b, causal=True, backend='step')[:, :, -1] for b in (shifted, bias))
    torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('biased', [False, True])
def test_a_nan_in_one_item_leaves_the_steps_of_another_alone(biased):
    phi_q, phi_k, v = features(2, 1, 5, 4), features(2, 1, 5, 4, seed=1), torch.randn(2, 1, 5, 3)
    bias = torch.randn(1, 9, generator=torch.Generator().manual_seed(0)) if biased else None
    expected = kernel_attention(phi_q[1:], phi_k[1:], v[1:], bias, causal=True, backend='step')
    phi_q, phi_k = phi_q * 1e-20, phi_k * 1e-20
    phi_q[0, 0, 2] = float('nan')
    z = kernel_attention(phi_q, phi_k, v, bias, causal=True, backend='step')
    assert z[0, 0, 2].isnan().all()
    torch.testing.assert_close(z[1:], expected, rtol=1e-4, atol=1e-5)


def test_step_gives_zero_where_no_key_has_any_weight():
    phi, v = features(1, 1, 4, 3), torch.randn(1, 1, 4, 2)
    for bias in (None, torch.randn(1, 7)):
        z = kernel_attention(phi, phi * torch.tensor([0.0, 0, 1, 1])[:, None], v, bias, causal=True, backend='step')
        assert (z[:, :, :2] == 0).all()
        assert z[:, :, 2:].isfinite().all()


@pytest.mark.parametrize('biased', [False, True])
def test_step_holds_large_values_beside_large_features(biased):
    phi, v = features(1, 1, 5, 4), torch.randn(1, 1, 5, 3, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(1, 9, generator=torch.Generator().manual_seed(0)) if biased else None
    expected = kernel_attention(phi, phi, v, bias, causal=True, backend='step')
    z = kernel_attention(phi, phi * 1e26, v * 1e15, bias, causal=True, backend='step')
    torch.testing.assert_close(z * 1e-15, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('backend', ['direct', 'linear', 'auto'])
def test_gradients_of_small_queries_beside_large_values_do_not_overflow(backend):
    """Denominators of 1e-28: below what their inverse times values and keys leaves in float32."""
    case = make_case(7, std=None, dtype=torch.float64)
    case.phi_q, case.phi_k, case.v = case.phi_q * 1e-32, case.phi_k * 1e3, case.v * 1e11
    leaves = case.map(lambda t: t.float().requires_grad_())
    exact = case.map(lambda t: t.float().double().requires_grad_())
    grads = [torch.autograd.grad(x.run(b).sum(), (x.phi_k, x.v)) for x, b in ((leaves, backend), (exact, 'direct'))]
    for mine, truth in zip(*grads):
        assert (mine.double() - truth).norm() <= 1e-4 * truth.norm()
