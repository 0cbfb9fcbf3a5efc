"""Features and attention from the packed projection, against the oracle and against the plain layer."""

import pytest
import torch

from nprf_vit.layers import KernelAttention, RelPosBias
from nprf_vit.ops import reference
from nprf_vit.ops.attention import packed_attention
from nprf_vit.ops.bias import Bias
from nprf_vit.ops.dispatch import BACKENDS
from nprf_vit.ops.features import draw_projection


def oracle(qkv, w, bias, far=None, grid_size=None, causal=False):
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    phi = [reference.features(x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6), w) for x in (q, k)]
    return reference.attention(*phi, v, bias, far, grid_size, causal).transpose(1, 2)


@pytest.mark.parametrize('case', ['grid', 'window', 'causal', 'none'])
def test_equals_the_oracle(case):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 12, 3, 2, 24, generator=generator) * 3
    qkv[0, 3], qkv[0, 4, 0] = 0.0, qkv[0, 4, 0] * 1e-3  # a token of zeros, a short query
    w = draw_projection(2, 20, 24)
    far = torch.randn(2, generator=generator) if case == 'window' else None
    shape = {'grid': (5, 7), 'window': (3, 3), 'causal': (23,), 'none': None}[case]
    bias = None if shape is None else torch.randn(2, *shape, generator=generator)
    options = {'grid_size': None if case == 'causal' else (3, 4), 'causal': case == 'causal'}
    leaves = [None if x is None else x.clone().requires_grad_() for x in (qkv, bias, far)]
    exact = [None if x is None else x.double().requires_grad_() for x in (qkv, bias, far)]
    given = None if bias is None else Bias(*leaves[1:])
    z = packed_attention(BACKENDS['fused'].run, leaves[0], w, given, **options)
    expected = oracle(exact[0], w.double(), exact[1], exact[2], **options)
    assert (z.double() - expected).norm() <= 1e-6 * expected.norm()
    given = [x for x in leaves if x is not None]
    grads = torch.autograd.grad(z.sin().sum(), given)
    truths = torch.autograd.grad(expected.sin().sum(), [x for x in exact if x is not None])
    for g, truth in zip(grads, truths):
        # without the token of zeros, whose gradient is 1e6 times the others'
        g, truth = (x[:, [*range(3), *range(4, 12)]] if x.dim() == 5 else x for x in (g.double(), truth))
        assert (g - truth).norm() <= 5e-6 * truth.norm()


@pytest.mark.parametrize('kernel', ['prf', 'orf', 'sphere'])
def test_the_layer_takes_the_packed_op(kernel, monkeypatch):
    layer = KernelAttention(32, 2, kernel=kernel, feature_dim=8, attn_backend='fused')
    table, x = RelPosBias((3, 4), 2), torch.randn(2, 3, 4, 32, requires_grad=True)
    torch.nn.init.normal_(table.table)
    results = []
    for backend in ('fused', 'direct'):
        layer.attn_backend = backend
        z = layer(x, table())
        results.append((z, *torch.autograd.grad(z.square().sum(), (x, table.table, layer.qkv.weight))))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_kernels_that_need_features_of_their_own_use_the_other_op():
    layer = KernelAttention(32, 2, kernel='elu', attn_backend='fused')
    x = torch.randn(1, 3, 4, 32)
    z = layer(x)
    layer.attn_backend = 'direct'
    torch.testing.assert_close(z, layer(x), rtol=1e-4, atol=1e-5)
