"""Masked keys in the kernels: an oracle leaves them out, forward and all gradients."""

import pytest
import torch

from nprf_vit.layers import KernelAttention, RelPosBias
from nprf_vit.ops import kernel_attention, reference

from .cases import GRADIENT, OUTPUT, make, upstream


def hidden(batch, n):
    mask = torch.rand(batch, n, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[0, n - n // 3 :] = False
    mask[:, 0] = False
    mask[:, 1] = True
    return mask


def check(tensors, mask, output=OUTPUT, gradient=GRADIENT, positive=True, **options):
    poison = {'phi_k': torch.nan, 'v': torch.inf}
    leaves = {
        name: (x.masked_fill(~mask[:, None, :, None], poison[name]) if name in poison else x.clone()).requires_grad_()
        for name, x in tensors.items()
    }
    z = kernel_attention(**leaves, backend='fused', key_mask=mask, positive=positive, **options)
    grads = dict(zip(leaves, torch.autograd.grad(z, list(leaves.values()), upstream(z))))
    exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
    weights = reference.attention_weights(
        **{name: x for name, x in exact.items() if name != 'v'}, key_mask=mask, **options
    )
    expected = weights @ exact['v']
    scale = weights.abs() @ exact['v'].abs()
    assert z.isfinite().all()
    assert ((z - expected).abs() <= output * scale).all(), ((z - expected).abs() / scale).nan_to_num().max()
    wanted = torch.autograd.grad(expected, list(exact.values()), upstream(z).double())
    for (name, g), right in zip(grads.items(), wanted):
        assert g.isfinite().all(), name
        assert (g.double() - right).norm() <= gradient * right.norm(), name
    for name in ('phi_k', 'v'):
        assert (grads[name].transpose(1, 2)[~mask] == 0).all()


@pytest.mark.parametrize('window', [None, (3, 3)])
def test_grids(window):
    check(make((4, 5), window=window), hidden(2, 20), grid_size=(4, 5))


@pytest.mark.parametrize('std', [0.5, None])
def test_causal(std):
    check(make(n=37, std=std), hidden(2, 37), causal=True)


def test_without_a_bias():
    check(make(n=37, std=None), hidden(2, 37))


@pytest.mark.parametrize('causal', [False, True])
def test_a_peak_above_a_masked_key(causal):
    tensors = make(n=21, batch=2)
    tensors['bias'][:, 20] += 100.0
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, 9], mask[1, 3:6] = False, False
    check(tensors, mask, output=2e-5, gradient=5e-4, causal=causal)


@pytest.mark.parametrize('window', [None, (3, 3)])
def test_large_values_beside_a_masked_key_below_a_peak(window):
    """What the masked key would count for is beyond float32; it has no part in a query's gradient, nor in far's."""
    tensors = make((3, 7), window=window)
    entries = tensors['bias'].view(2, -1)
    entries[:, entries.shape[1] // 2] += 120.0
    tensors['v'] *= 1e6
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, 9], mask[1, 3:6] = False, False
    check(tensors, mask, output=2e-5, gradient=5e-4, grid_size=(3, 7))


def test_signed_features_below_a_peak_above_a_masked_key():
    tensors = make((3, 7), seed=1)
    tensors['phi_q'][..., 0] *= -0.2
    entries = tensors['bias'].view(2, -1)
    entries[:, entries.shape[1] // 2] += 200.0
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, 9], mask[1, 3:6] = False, False
    check(tensors, mask, output=2e-5, gradient=5e-4, positive=False, grid_size=(3, 7))


@pytest.mark.parametrize('positive', [True, False])
@pytest.mark.parametrize('window', [None, (3, 3)])
def test_an_item_without_keys(window, positive):
    mask = hidden(2, 20)
    mask[1] = False
    check(make((4, 5), window=window), mask, grid_size=(4, 5), positive=positive)


def test_the_layer_hands_over_from_packed_to_features():
    torch.manual_seed(0)
    attn = KernelAttention(32, 2, feature_dim=8, attn_backend='fused')
    plain = KernelAttention(32, 2, feature_dim=8, attn_backend='direct')
    plain.load_state_dict(attn.state_dict())
    x, bias = torch.randn(2, 4, 5, 32), RelPosBias((4, 5), 2)((4, 5))
    mask = hidden(2, 20)
    torch.testing.assert_close(attn(x, bias, key_mask=mask), plain(x, bias, key_mask=mask), rtol=1e-4, atol=1e-5)
