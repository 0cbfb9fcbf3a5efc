"""The causal pixel transformer: order, causality, variants, cached decoding."""

import math

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2

import nprf_vit  # noqa: F401  registers the models
from nprf_vit.models.pixel import from_raster, to_raster
from nprf_vit.models.pixel_generation import PixelDecoder

TINY = {'img_size': 4, 'in_chans': 3, 'levels': 9, 'embed_dim': 32, 'depth': 2, 'num_heads': 2, 'feature_dim': 8}
NAMES = ('nprf_pixel_imagenet32', 'prf_pixel_imagenet32', 'softmax_pixel_imagenet32')
VARIANTS = [
    {},
    {'rel_pos': 'layer'},
    {'rel_pos': 'none'},
    {'pos_embed': 'learn'},
    {'normalize': False},
    {'kernel': 'orf', 'normalize': False, 'rel_pos': 'none'},
    {'kernel': 'sphere'},
    {'kernel': 'trf'},
    {'kernel': 'elu'},
    {'kernel': 'softmax'},
    {'kernel': 'softmax', 'rel_pos': 'layer', 'normalize': False},
    {'kernel': 'softmax', 'rel_pos': 'none', 'normalize': False},
]


def make(name='nprf_pixel_imagenet32', **kwargs):
    """A small model whose weights, biases and positions all matter."""
    model = timm.create_model(name, **{**TINY, **kwargs}).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(('table', 'pos_embed', 'start_token', 'embed.weight')):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(std=2 / math.sqrt(parameter.shape[-1]))
    return model


def images(model, batch=2):
    return torch.randint(model.levels, (batch, model.in_chans, *model.img_size))


@pytest.mark.parametrize(
    ('name', 'parameters', 'kernel', 'normalize', 'rel_pos'),
    [
        ('nprf_pixel_imagenet32', 19_489_528, 'prf', True, 'shared'),
        ('prf_pixel_imagenet32', 21_013_248, 'prf', False, 'none'),
        ('softmax_pixel_imagenet32', 19_489_528, 'softmax', False, 'shared'),
    ],
)
def test_entry_points_are_their_rows(name, parameters, kernel, normalize, rel_pos):
    assert set(timm.list_models(module='pixel')) == set(NAMES)
    with torch.device('meta'):
        model = timm.create_model(name)
    block = model.blocks[0]
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert (block.attn.kernel, block.attn.normalize, model.rel_pos) == (kernel, normalize, rel_pos)
    assert (len(model.blocks), model.embed_dim, block.attn.num_heads, block.attn.feature_dim) == (6, 512, 8, 32)
    assert (model.length, model.levels, block.mlp.fc1.out_features) == (3072, 256, 2048)
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.1, 0.0}  # 0: attention weights
    assert (model.pos_embed is None) == (rel_pos != 'none')


def test_raster_order_is_pixel_by_pixel_with_channels_side_by_side():
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    raster = to_raster(x)
    for y, col, c in ((0, 0, 0), (0, 0, 2), (0, 1, 0), (3, 4, 2), (2, 1, 1)):
        assert torch.equal(raster[:, (y * 5 + col) * 3 + c], x[:, c, y, col])
    assert torch.equal(from_raster(raster, 3, (4, 5)), x)


@pytest.mark.parametrize('kwargs', VARIANTS, ids=str)
def test_no_byte_sees_itself_or_a_later_one(kwargs):
    model = make(**kwargs)
    before = images(model)
    with torch.no_grad():
        base = model(before)
        assert base.shape == (2, 48, 9) and base.isfinite().all()
        for t in (0, 1, 2, 3, 17, 46, 47):
            raster = to_raster(before).clone()
            raster[:, t:] = (raster[:, t:] + 1 + torch.randint(model.levels - 1, raster[:, t:].shape)) % model.levels
            changed = model(from_raster(raster, 3, (4, 4)))
            assert torch.equal(changed[:, : t + 1], base[:, : t + 1])
            # and the comparison can fail: everything after t has seen the change
            assert t == 47 or (changed[:, t + 1 :] != base[:, t + 1 :]).any(-1).all()


def test_gradients_reach_no_later_byte():
    model = make()
    rows = []
    model.embed.register_forward_hook(lambda m, args, out: rows.append(out) or out.retain_grad())
    model(images(model))[:, 20].sum().backward()
    grad = rows[0].grad.abs().sum((0, 2))  # position t of the embedded input holds byte t
    assert grad[:20].all() and not grad[20:].any()


@pytest.mark.parametrize('kwargs', VARIANTS, ids=str)
@pytest.mark.parametrize('in_chans', [1, 3])
def test_cached_logits_are_the_teacher_forced_ones(kwargs, in_chans):
    model = make(**kwargs, in_chans=in_chans)
    x = images(model, 3)
    raster = to_raster(x)
    with torch.no_grad():
        expected = model(x)
    decoder = PixelDecoder(model.train(), 3)  # decoding never drops anything
    got = torch.stack([decoder.step(raster[:, t - 1] if t else None) for t in range(model.length)], dim=1)
    assert (got - expected).abs().max() < 1e-4
    assert (got - expected.roll(1, 1)).abs().amax(-1).min() > 1e-2  # neighbours differ, so a shift would be noticed


@pytest.mark.parametrize('name', NAMES)
def test_cached_logits_at_full_width(name):
    model = timm.create_model(name, img_size=8).eval()
    torch.nn.init.normal_(model.embed.weight)
    x = images(model, 1)
    with torch.no_grad():
        expected, raster, decoder = model(x), to_raster(x), PixelDecoder(model, 1)
        got = torch.stack([decoder.step(raster[:, t - 1] if t else None) for t in range(192)], dim=1)
    assert (got - expected).abs().max() < 1e-4


def test_decoder_refuses_what_does_not_follow():
    model = make(length=2)
    decoder = PixelDecoder(model, 1)
    byte = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match='byte 0 needs no byte before it'):
        decoder.step(byte)
    decoder.step()
    with pytest.raises(ValueError, match='byte 1 needs the byte before it'):
        decoder.step()
    decoder.step(byte)
    with pytest.raises(ValueError, match='all 2 bytes are decoded'):
        decoder.step(byte)


def test_embedding_knows_the_channel():
    model = make()
    raster = torch.full((1, 6), 4)
    rows = model.embed_bytes(raster)[0]
    assert torch.equal(rows[:3], rows[3:]) and not torch.equal(rows[0], rows[1])
    assert torch.equal(model.embed_bytes(raster[:, 2:], first=2)[0], rows[2:])


def test_the_masked_bias_is_what_each_layer_would_mask():
    model = make('softmax_pixel_imagenet32')
    x = images(model)
    expected = model(x)
    model.masks_bias = False
    for block in model.blocks:
        block.attn.causal = True
    torch.testing.assert_close(model(x), expected)


def test_grey_image_of_another_size_and_length():
    model = make(img_size=(8, 6), in_chans=1, levels=17)
    assert model(images(model)).shape == (2, 48, 17)
    short = make(img_size=(8, 6), in_chans=1, levels=17, length=20)
    assert short(images(short)).shape == (2, 20, 17)
    assert timm.create_model('nprf_pixel_imagenet32', **{**TINY, 'levels': 5}, num_classes=7).levels == 5
    assert timm.create_model('nprf_pixel_imagenet32', img_size=4, num_classes=7).levels == 7


@pytest.mark.parametrize('kwargs', VARIANTS, ids=str)
def test_every_weight_learns(kwargs):
    model = make(**kwargs, drop_path_rate=0.1).train()
    model(images(model)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_checkpointing_changes_nothing():
    model = make()
    x = images(model)
    grads = []
    for enabled in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enabled)
        model(x).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_timm_manners():
    model = make(drop_rate=0.2, drop_path_rate=0.1)
    assert model.get_classifier() is model.head
    tokens = model.forward_features(images(model))
    assert tokens.shape == (2, 48, 32) and model.forward_head(tokens).shape == (2, 48, 9)
    model.reset_classifier(0)
    assert model(images(model)).shape == (2, 48, 32)
    with pytest.raises(ValueError, match='9 levels, not 10 classes'):
        model.reset_classifier(10)
    groups = create_optimizer_v2(make(), opt='adamw', lr=1e-3, weight_decay=0.1, layer_decay=0.9).param_groups
    assert {g['weight_decay'] for g in groups} == {0.0, 0.1}
    assert {'rel_pos_bias.table', 'start_token', 'pos_embed'} <= make().no_weight_decay()


def test_meta_device_init():
    torch.manual_seed(3)
    direct = timm.create_model('nprf_pixel_imagenet32', **TINY)
    model = timm.create_model('nprf_pixel_imagenet32', **TINY, device='meta').to_empty(device='cpu')
    model.init_weights()
    for (name, a), b in zip(direct.state_dict().items(), model.state_dict().values()):
        assert b.isfinite().all() and b.std() == pytest.approx(float(a.std()), abs=0.03), name
    assert torch.equal(direct.blocks[1].attn.w, model.blocks[1].attn.w)


def test_softmax_weights_load_into_the_kernelized_twin():
    softmax, nprf = make('softmax_pixel_imagenet32'), make()
    missing = nprf.load_state_dict(softmax.state_dict(), strict=False)
    assert set(missing.missing_keys) == {'blocks.0.attn.w', 'blocks.1.attn.w'} and not missing.unexpected_keys


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'rel_pos': 'both'}, "unknown rel_pos 'both'"),
        ({'pos_embed': 'sine'}, "unknown pos_embed 'sine'"),
        ({'levels': 1}, 'levels must be at least 2'),
        ({'length': 49}, 'length 49 must lie in 1..48'),
        ({'kernel': 'relu'}, "unknown kernel 'relu'"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('nprf_pixel_imagenet32', **{**TINY, **kwargs})


@pytest.mark.parametrize(
    ('x', 'message'),
    [
        (torch.zeros(2, 3, 4, 4), 'expected integer images'),
        (torch.zeros(2, 3, 4, 5, dtype=torch.uint8), r'\(B, 3, 4, 4\), got torch.uint8 \(2, 3, 4, 5\)'),
        (torch.full((2, 3, 4, 4), 9), r'bytes lie in 9..9, the model has levels 0..8'),
        (torch.full((2, 3, 4, 4), -1), 'bytes lie in -1..-1'),
    ],
)
def test_bad_images(x, message):
    with pytest.raises(ValueError, match=message):
        make()(x)
