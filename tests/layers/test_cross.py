"""Cross attention of `KernelAttention`: queries from x, keys and values from a context, by the packed weights."""

import pytest
import torch
from torch import nn

from nprf_vit.layers import KERNELS, KernelAttention
from nprf_vit.layers.attention import unit_norm, widen
from nprf_vit.layers.cached_attention import CrossAttentionStep
from nprf_vit.ops import reference


def layer(kernel='prf', **options):
    torch.manual_seed(0)
    return KernelAttention(16, 2, kernel=kernel, feature_dim=8, **options).double()


def inputs(n=5, keys=9):
    g = torch.Generator().manual_seed(1)
    x, context = (torch.randn(2, s, 16, generator=g, dtype=torch.double) for s in (n, keys))
    mask = torch.arange(keys) < torch.tensor([[keys], [4]])
    return x, context, mask


def expected(attn, x, context, mask):
    """From whole projections of both, by the oracle."""
    q, _, _ = attn.project(x)
    _, k, v = attn.project(context)
    if attn.kernel == 'softmax':
        q, k = (unit_norm(y) if attn.normalize else y * 8**-0.25 for y in (q, k))
        scores = torch.einsum('bkid,bkjd->bkij', q, k).masked_fill(~mask[:, None, None], -torch.inf)
        z = scores.softmax(-1) @ v
    else:
        q, k = (unit_norm(y) if attn.normalize else widen(y) * 8**-0.25 for y in (q, k))
        w = None if attn.w is None else attn.w.double()
        kind = attn.kernel if attn.kernel in ('trf', 'elu') else 'prf'
        phi_q, phi_k = (reference.features(y, w, kind) for y in (q, k))
        z = reference.attention(phi_q, phi_k, v, key_mask=mask)
    return attn.proj(z.transpose(1, 2).flatten(2))


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('keys', [9, 5, 1])
def test_against_the_oracle(kernel, normalize, keys):
    attn = layer(kernel, normalize=normalize)
    x, context, mask = inputs(keys=keys)
    out = attn(x, context=context, key_mask=mask)
    wanted = expected(attn, x, context, mask)
    torch.testing.assert_close(out, wanted, rtol=1e-8, atol=1e-10)
    grads = [torch.autograd.grad(y.square().sum(), list(attn.parameters())) for y in (out, wanted)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('kernel', ['prf', 'softmax'])
def test_to_oneself_is_self_attention(kernel):
    attn = layer(kernel)
    x, _, _ = inputs()
    torch.testing.assert_close(attn(x, context=x), attn(x))
    grid = x[:, :4].unflatten(1, (2, 2))
    torch.testing.assert_close(attn(grid, context=grid), attn(grid))


def test_wrapped_projections_are_not_cut():
    """As adapters wrap them: the module is called, its weight is not looked at."""

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 0.0

    attn = layer()
    x, context, mask = inputs()
    whole = attn(x, context=context, key_mask=mask)
    attn.qkv = Wrapped(attn.qkv)
    torch.testing.assert_close(attn(x, context=context, key_mask=mask), whole)


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('normalize', [True, False])
def test_token_by_token(kernel, normalize):
    attn = layer(kernel, normalize=normalize, qk_norm=True)
    x, context, mask = inputs()
    mask[1] = False
    step = CrossAttentionStep(attn, context.masked_fill(~mask[..., None], torch.nan), mask)
    out = torch.stack([step(x[:, t]) for t in range(5)], 1)
    torch.testing.assert_close(out, attn(x, context=context, key_mask=mask), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ('options', 'call', 'message'),
    [
        ({'rel_pos_size': (5,)}, {}, 'bias is about offsets within one sequence'),
        ({}, {'bias': torch.zeros(2, 9)}, 'bias is about offsets within one sequence'),
        ({'causal': True}, {}, 'order within one sequence'),
        ({}, {'is_causal': True}, 'order within one sequence'),
        ({}, {'key_mask': torch.ones(2, 5, dtype=torch.bool)}, r'\(2, 5\) does not fit 2 x 9 tokens'),
        ({}, {'context': torch.zeros(2, 9, 8)}, r'context \(2, 9, 8\) beside x \(2, 5, 16\)'),
        ({}, {'context': torch.zeros(1, 9, 16)}, r'context \(1, 9, 16\)'),
        ({}, {'context': torch.zeros(9, 16)}, r'context \(9, 16\)'),
    ],
)
def test_errors(options, call, message):
    x, context, _ = inputs()
    with pytest.raises(ValueError, match=message):
        layer(**options)(x, **{'context': context} | call)
