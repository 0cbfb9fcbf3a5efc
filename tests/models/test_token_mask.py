"""Padding and left-out patches in whole models, by timm's `attn_mask`."""

import inspect

import pytest
import timm
import torch
from timm.models.naflexvit import create_attention_mask
from timm.models.vision_transformer import VisionTransformer

from nprf_vit.models.token_mask import pool_tokens

from .small import make

VARIANTS = [
    {'rel_pos_extend': 'extend'},
    {'rel_pos_extend': 'extend', 'rel_pos': 'layer'},
    {'rel_pos_extend': 'extend', 'kernel': 'softmax'},
    {'rel_pos_extend': 'extend', 'kernel': 'trf', 'normalize': False},
    {'rel_pos': 'none', 'pos_embed': 'none', 'normalize': False},
    {'rel_pos': 'none', 'pos_embed': 'none', 'class_token': True, 'reg_tokens': 2, 'global_pool': 'avg'},
]


def pad(images, size, fill=0.0):
    """Images of different sizes on one canvas, and which of its 16 px patches they cover."""
    canvas = torch.full((len(images), 3, *size), fill)
    mask = torch.zeros(len(images), size[0] // 16, size[1] // 16, dtype=torch.bool)
    for image, item, seen in zip(images, canvas, mask):
        item[:, : image.shape[1], : image.shape[2]] = image
        seen[: image.shape[1] // 16, : image.shape[2] // 16] = True
    return canvas, mask


@pytest.fixture
def images():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(3, *size, generator=g) for size in ((64, 64), (48, 80), (96, 32))]


@pytest.mark.parametrize('kwargs', VARIANTS)
@pytest.mark.parametrize('fill', [0.0, 1e4, float('nan')])
def test_padding_changes_nothing(kwargs, fill, images):
    """Images of three sizes in one batch: logits, tokens and every gradient are those of each image by itself."""
    model = make(dynamic_img_size=True, **kwargs)
    canvas, mask = pad(images, (96, 96), fill)
    logits = model(canvas, attn_mask=mask)
    tokens = model.forward_features(canvas, attn_mask=mask)
    maps = model.forward_intermediates(canvas, attn_mask=mask, intermediates_only=True)
    assert tokens.isfinite().all() and all(m.isfinite().all() for m in maps)
    alone = [model(image[None]) for image in images]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=1e-4, atol=1e-5)
    for i, image in enumerate(images):
        h, w = (s // 16 for s in image.shape[1:])
        for padded, own in zip(maps, model.forward_intermediates(image[None], intermediates_only=True)):
            torch.testing.assert_close(padded[i, :, :h, :w], own[0], rtol=1e-4, atol=1e-5)
    grads = []
    for out in (logits, torch.cat(alone)):
        model.zero_grad()
        out.square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 10
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


def test_without_the_mask_padding_counts(images):
    model = make(dynamic_img_size=True, rel_pos_extend='extend')
    canvas, _ = pad(images, (96, 96))
    assert not torch.allclose(model(canvas), torch.cat([model(image[None]) for image in images]), atol=1e-3)


@pytest.mark.parametrize('global_pool', ['avg', 'max', 'avgmax', 'map'])
def test_pooling(global_pool, images):
    model = make(dynamic_img_size=True, rel_pos_extend='extend', global_pool=global_pool)
    canvas, mask = pad(images, (96, 96))
    expected = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(canvas, attn_mask=mask), expected, rtol=1e-4, atol=1e-5)
    tokens = model.forward_features(canvas, attn_mask=mask)
    torch.testing.assert_close(model.forward_head(tokens, attn_mask=mask.flatten(1)), expected, rtol=1e-4, atol=1e-5)
    mask[0] = False
    model(canvas, attn_mask=mask).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_pooling_without_masks_says_so(images):
    model = make(dynamic_img_size=True, global_pool='prr')
    canvas, mask = pad(images, (96, 96))
    with pytest.raises(ValueError, match="'prr' takes no mask"):
        model(canvas, attn_mask=mask)


@pytest.mark.parametrize('kwargs', [{}, {'rel_pos': 'none', 'class_token': True}])
def test_forms_of_a_mask(kwargs, image):
    model = make(**kwargs)
    prefix = model.num_prefix_tokens
    mask = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.7
    expected = model(image, attn_mask=mask)
    whole = torch.cat([torch.ones(2, prefix, dtype=torch.bool), mask.flatten(1)], 1)
    added = create_attention_mask(mask.flatten(1), prefix, symmetric=False, q_len=1)  # timm's, 0 and -3e38
    for same in (mask.flatten(1), mask.flatten(1)[:, None, None], whole, whole[:, None, None], added):
        torch.testing.assert_close(model(image, attn_mask=same), expected)
        torch.testing.assert_close(
            model.get_intermediate_layers(image, attn_mask=same)[0].isfinite().all().item(), True
        )
    assert not torch.allclose(model(image), expected)


def test_the_signatures_are_timms():
    for name in ('forward', 'forward_features', 'forward_intermediates'):
        ours, theirs = (inspect.signature(getattr(c, name)).parameters for c in (type(make()), VisionTransformer))
        assert list(ours) == list(theirs), name


@pytest.mark.parametrize(
    ('mask', 'message'),
    [
        (torch.ones(2, 1, 16, 16, dtype=torch.bool), r'\(2, 1, 16, 16\) between queries and keys is not supported'),
        (create_attention_mask(torch.ones(2, 16, dtype=torch.bool)), 'between queries and keys is not supported'),
        (torch.ones(16, 16), 'between queries and keys is not supported'),
        (torch.ones(2, 16), 'float32'),
        (torch.ones(2, 2, 8, dtype=torch.bool), r'\(2, 2, 8\).*4x4 grid'),
        (torch.ones(2, 3, 4, dtype=torch.bool), r'\(2, 3, 4\) does not fit'),
        (torch.full((2, 1, 1, 16), -0.5), 'added to scores'),
        ('mask', 'str'),
    ],
)
def test_errors(mask, message, image):
    model = make()
    for function in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(ValueError, match=message):
            function(image, attn_mask=mask)


def test_causal_is_refused(image):
    for function in (make(), make().forward_features, make().forward_intermediates):
        with pytest.raises(ValueError, match='is_causal'):
            function(image, is_causal=True)


def test_gradient_checkpointing(image):
    model = make().train()
    mask = torch.rand(2, 16, generator=torch.Generator().manual_seed(1)) < 0.7
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(image, attn_mask=mask).sum().backward()
        grads.append(model.rel_pos_bias.table.grad.clone())
    assert torch.equal(*grads)


def test_a_traced_model_takes_a_mask_or_none(image):
    model = make()
    mask = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.7
    traced = timm.layers.create_feature_extractor(model, {'head': 'logits'})
    torch.testing.assert_close(traced(image)['logits'], model(image))
    torch.testing.assert_close(traced(image, attn_mask=mask)['logits'], model(image, attn_mask=mask))


def test_patch_dropout_has_no_mask(image):
    model = make(rel_pos='none', patch_drop_rate=0.5).train()
    with pytest.raises(ValueError, match='patch_drop_rate'):
        model(image, attn_mask=torch.ones(2, 16, dtype=torch.bool))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('pool', ['avg', 'avgmax'])
def test_a_mean_in_half_precision_is_summed_in_float32(pool, dtype):
    """A sum of 4096 tokens of 20 is beyond float16, their mean is not: as timm's, it is rounded once."""
    x = 20 + torch.randn(2, 4096, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    everything = torch.ones(2, 4096, dtype=torch.bool)
    masked, plain = (pool_tokens(x, mask, pool, 0, False, None) for mask in (everything, None))
    assert masked.dtype == dtype
    torch.testing.assert_close(masked, plain, rtol=torch.finfo(dtype).eps, atol=0)
    exact = pool_tokens(x.double(), None, pool, 0, False, None)
    torch.testing.assert_close(masked.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize('shape', [(1, 4, 4), (1, 16), (1, 1, 1, 16)])
def test_a_mask_on_another_device_is_refused(shape):
    mask = torch.ones(shape, dtype=torch.bool, device='meta')
    with pytest.raises(ValueError, match='mask of tokens is on meta, the tokens on cpu: expected one device'):
        make()(torch.randn(1, 3, 64, 64), attn_mask=mask)
