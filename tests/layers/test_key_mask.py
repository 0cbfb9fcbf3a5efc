"""Masked tokens in `KernelAttention`: what is masked might as well not be there."""

import pytest
import torch

from nprf_vit.layers import KERNELS, KernelAttention, RelPosBias
from nprf_vit.layers.key_mask import as_key_mask


def layer(kernel, **options):
    torch.manual_seed(0)
    return KernelAttention(16, 2, kernel=kernel, feature_dim=8, **options).double()


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('rel_pos_size', [None, (9,)])
def test_padding_does_not_count(kernel, normalize, causal, rel_pos_size):
    """Behind a sequence: what is left is the shorter one. Outputs and gradients of every parameter."""
    attn = layer(kernel, normalize=normalize, causal=causal, rel_pos_size=rel_pos_size, rel_pos_extend='extend')
    x = torch.randn(2, 9, 16, dtype=torch.double)
    x[:, 6:] *= 1e3
    mask = (torch.arange(9) < 6).expand(2, -1)
    out = attn(x, key_mask=mask)[:, :6]
    alone = attn(x[:, :6])
    torch.testing.assert_close(out, alone, rtol=1e-7, atol=1e-9)
    parameters = list(attn.parameters())
    grads = [torch.autograd.grad(y.square().sum(), parameters, allow_unused=True) for y in (out, alone)]
    for a, b in zip(*grads):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('kernel', ['prf', 'trf', 'softmax'])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('bias', [False, True])
def test_rows_without_keys(kernel, causal, bias):
    attn = layer(kernel, causal=causal, rel_pos_size=(5,) if bias else None)
    x = torch.randn(2, 5, 16, dtype=torch.double, requires_grad=True)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0] = False
    mask[1, :2] = False
    out = attn(x, key_mask=mask)
    blind = attn.proj(torch.zeros(16, dtype=torch.double))
    assert (out[0] == blind).all() and (not causal or (out[1, :2] == blind).all())
    out.square().sum().backward()
    assert x.grad.isfinite().all() and (x.grad[0] == 0).all()
    assert all(p.grad.isfinite().all() for p in attn.parameters())


@pytest.mark.parametrize('kernel', ['prf', 'softmax'])
@pytest.mark.parametrize('normalize', [True, False])
def test_the_queries_of_masked_tokens_go_on(kernel, normalize):
    """Only keys are masked: a token that nobody sees still sees the others, as one that predicts itself must."""
    attn = layer(kernel, normalize=normalize)
    x = torch.randn(1, 4, 16, dtype=torch.double)
    mask = torch.tensor([[True, True, True, False]])
    a, b = attn(x, key_mask=mask), attn(x.index_fill(1, torch.tensor([3]), 0.5), key_mask=mask)
    torch.testing.assert_close(a[:, :3], b[:, :3], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(a[:, 3], b[:, 3])


@pytest.mark.parametrize('kernel', ['prf', 'softmax'])
def test_nan_in_masked_tokens_reaches_nobody(kernel):
    attn = layer(kernel)
    x = torch.randn(1, 4, 16, dtype=torch.double)
    x[:, 3] = torch.nan
    out = attn(x, key_mask=torch.tensor([[True, True, True, False]]))
    assert out[:, :3].isfinite().all()
    torch.testing.assert_close(out[:, :3], attn(x[:, :3]), rtol=1e-8, atol=1e-10)


def test_forms_of_a_mask():
    attn, bias = layer('prf'), RelPosBias((2, 3), 2).double()((2, 3))
    x = torch.randn(2, 2, 3, 16, dtype=torch.double)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 1, 1, 0, 1]]).bool()
    expected = attn(x, bias, key_mask=mask)
    assert not torch.allclose(expected, attn(x, bias))
    for same in (mask.view(2, 2, 3), mask[:, None, None]):
        assert torch.equal(attn(x, bias, key_mask=same), expected)
        assert torch.equal(attn(x, bias, attn_mask=same), expected)
    assert as_key_mask(torch.ones(3, 1, 1, dtype=torch.bool), (3, 1), torch.device('cpu')).shape == (3, 1)


@pytest.mark.parametrize(
    ('mask', 'message'),
    [
        (torch.ones(2, 6, 6, dtype=torch.bool), r'\(2, 6, 6\) between queries and keys is not supported'),
        (torch.ones(6, 6, dtype=torch.bool), r'\(6, 6\) between queries and keys'),
        (torch.ones(2, 2, 6, 6, dtype=torch.bool), r'\(2, 2, 6, 6\) between queries and keys'),
        (torch.zeros(2, 6), 'float32'),
        (torch.ones(2, 5, dtype=torch.bool), r'\(2, 5\) does not fit 2 x 6 tokens.*\(2, 6\)'),
        (torch.ones(1, 6, dtype=torch.bool), r'\(1, 6\) does not fit'),
        ([True] * 6, 'list'),
    ],
)
def test_errors(mask, message):
    with pytest.raises(ValueError, match=message):
        layer('prf')(torch.randn(2, 2, 3, 16, dtype=torch.double), attn_mask=mask)


def test_two_masks_are_one_too_many():
    mask = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match='one of them'):
        layer('prf')(torch.randn(1, 4, 16, dtype=torch.double), attn_mask=mask, key_mask=mask)
