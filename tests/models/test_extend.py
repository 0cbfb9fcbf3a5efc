"""rel_pos_extend='extend': the learned table as a window, a constant beyond it."""

import logging

import pytest
import timm
import torch

import nprf_vit
from nprf_vit.layers import expand_table
from nprf_vit.ops import reference

from .small import SMALL, make

SIZES = [(96, 96), (32, 80), (160, 112), (16, 16)]
VARIANTS = [{}, {'rel_pos': 'layer'}, {'kernel': 'softmax'}, {'kernel': 'trf'}, {'pos_embed': 'learn'}]


def extended(**kwargs):
    model = make(rel_pos_extend='extend', **kwargs)
    for bias in model.bias_modules().values():
        torch.nn.init.normal_(bias.far)
    return model


@pytest.mark.parametrize('kwargs', VARIANTS)
def test_at_the_trained_grid_nothing_changes(kwargs, image):
    model, other = make(**kwargs), extended(**kwargs)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(image), other(image))
    other.zero_grad()
    other(image).sum().backward()
    for bias in other.bias_modules().values():
        assert bias.table.grad.any() and bias.far.grad is not None and not bias.far.grad.any()


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('kwargs', VARIANTS)
def test_every_way_to_another_grid_agrees(size, kwargs, tmp_path):
    trained = extended(**kwargs)
    image = torch.randn(2, 3, *size)
    dynamic = make(rel_pos_extend='extend', dynamic_img_size=True, **kwargs)
    dynamic.load_state_dict(trained.state_dict())
    expected = dynamic(image)

    torch.save({'state_dict': trained.state_dict()}, tmp_path / 'trained.pth')
    options = {**SMALL, **kwargs, 'img_size': size, 'rel_pos_extend': 'extend'}
    loaded = timm.create_model('nprf_deit_base', checkpoint_path=tmp_path / 'trained.pth', **options).eval()
    torch.testing.assert_close(loaded(image), expected)

    built = make(rel_pos_extend='extend', rel_pos_size=4, **kwargs, img_size=size)
    built.load_state_dict(loaded.state_dict())
    torch.testing.assert_close(built(image), expected)

    trained.set_input_size(size)
    torch.testing.assert_close(trained(image), expected)
    for bias in trained.bias_modules().values():
        assert bias.table.shape == (2, 7, 7)


@pytest.mark.parametrize('backend', ['auto', 'direct', 'fft', 'window'])
def test_the_layer_attends_as_the_dense_oracle_does(backend):
    layer = nprf_vit.layers.KernelAttention(
        32, 2, rel_pos_size=(3, 2), rel_pos_extend='extend', attn_backend=backend, dtype=torch.float64
    )
    torch.nn.init.normal_(layer.rel_pos_bias.table)
    torch.nn.init.normal_(layer.rel_pos_bias.far)
    x = torch.randn(2, 7, 5, 32, dtype=torch.float64)
    q, k, v = layer.project(x)
    whole = layer.rel_pos_bias.whole_table((7, 5))
    z = reference.attention(*layer.features(q, k), v, bias=whole, grid_size=(7, 5))
    torch.testing.assert_close(layer(x), layer.proj(z.transpose(1, 2).reshape(x.shape)))
    weight = expand_table(whole, (7, 5))
    assert (weight == layer.rel_pos_bias.beyond()[:, None, None]).any(), 'the constant is in use on this grid'


def test_fine_tuning_trains_table_and_constant():
    model = make(rel_pos_extend='extend', num_classes=0)
    start = model.rel_pos_bias.beyond().detach().clone()
    model.set_input_size((96, 80))
    decayed = model.no_weight_decay()
    assert {'rel_pos_bias.table', 'rel_pos_bias.far'} <= decayed
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    model.train()(torch.randn(2, 3, 96, 80)).square().sum().backward()
    assert model.rel_pos_bias.table.grad.abs().min() > 0 and model.rel_pos_bias.far.grad.abs().min() > 0
    optimizer.step()
    assert ((model.rel_pos_bias.beyond() - start).abs() > 1e-3).all()


def test_the_one_line_about_a_checkpoint_of_another_grid(caplog):
    with caplog.at_level(logging.WARNING):
        model = make(rel_pos_extend='extend', img_size=96)
        model.load_state_dict(make().state_dict())
    line = [r.getMessage() for r in caplog.records if r.name == 'nprf_vit.models.state_dicts'][-1]
    assert 'kept rel_pos_bias.table ((7, 7), a window of (11, 11))' in line and 'added rel_pos_bias.far (zero)' in line
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        plain = make(img_size=96)
        plain.load_state_dict(model.state_dict())
    line = [r.getMessage() for r in caplog.records if r.name == 'nprf_vit.models.state_dicts'][-1]
    assert 'resized rel_pos_bias.table' in line and 'dropped rel_pos_bias.far' in line


@pytest.mark.parametrize('rel_pos', ['shared', 'layer'])
def test_a_checkpoint_is_cropped_to_the_window_that_was_asked_for(rel_pos, caplog):
    trained = make(rel_pos=rel_pos)
    for bias in trained.bias_modules().values():
        torch.nn.init.normal_(bias.table)
    with caplog.at_level(logging.WARNING):
        model = make(rel_pos=rel_pos, rel_pos_extend='extend', rel_pos_size=(3, 2), img_size=96)
        model.load_state_dict(trained.state_dict())
    line = [r.getMessage() for r in caplog.records if r.name == 'nprf_vit.models.state_dicts'][-1]
    assert 'cropped' in line and 'rel_pos_bias.table ((7, 7) to (5, 3))' in line
    for bias, whole in zip(model.bias_modules().values(), trained.bias_modules().values()):
        assert torch.equal(bias.table, whole.table[:, 1:6, 2:5])
        ring = torch.cat([bias.table[:, 0], bias.table[:, -1], bias.table[:, 1:-1, 0], bias.table[:, 1:-1, -1]], 1)
        torch.testing.assert_close(bias.beyond(), ring.mean(1))
        torch.nn.init.normal_(bias.far)
    smaller = make(rel_pos=rel_pos, rel_pos_extend='extend', rel_pos_size=2, img_size=96)
    smaller.load_state_dict(model.state_dict())
    larger = make(rel_pos=rel_pos, rel_pos_extend='extend', rel_pos_size=5, img_size=96)
    larger.load_state_dict(model.state_dict())
    found = [m.bias_modules().values() for m in (model, smaller, larger)]
    for bias, cropped, grown in zip(*found):
        assert torch.equal(cropped.table, bias.table[:, 1:4])
        torch.testing.assert_close(cropped.beyond(), bias.beyond())
        torch.testing.assert_close(grown.table, bias.whole_table((5, 5)))
        torch.testing.assert_close(grown.beyond(), bias.beyond())
    image = torch.randn(1, 3, 96, 96)
    torch.testing.assert_close(larger(image), model(image))


def test_shared_window_into_layers():
    shared, layers = extended(), make(rel_pos_extend='extend', rel_pos='layer', img_size=96)
    layers.load_state_dict(shared.state_dict())
    for bias in layers.bias_modules().values():
        assert torch.equal(bias.table, shared.rel_pos_bias.table) and torch.equal(bias.far, shared.rel_pos_bias.far)


def test_an_optimizer_made_before_loading_still_trains_the_window(image):
    model = make(rel_pos_extend='extend', img_size=96)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.load_state_dict(make().state_dict())
    before = model.rel_pos_bias.table.detach().clone()
    model.train()(torch.randn(2, 3, 96, 96)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.rel_pos_bias.table, before)


def test_grad_checkpointing_and_features(image):
    model = extended(dynamic_img_size=True)
    image = torch.randn(1, 3, 80, 112)
    plain = model(image)
    model.set_grad_checkpointing()
    again = model.train()(image)
    torch.testing.assert_close(again, plain)
    again.sum().backward()
    assert model.rel_pos_bias.far.grad.any()
    features = timm.create_model(
        'nprf_deit_base', features_only=True, dynamic_img_size=True, rel_pos_extend='extend', **SMALL
    )
    assert [tuple(f.shape) for f in features(image)] == [(1, 32, 5, 7)] * 3


def test_conversion_keeps_the_window():
    model = extended(kernel='softmax', dynamic_img_size=True)
    twin = nprf_vit.convert(model, feature_dim=2048)
    image = torch.randn(1, 3, 96, 64)
    assert twin.rel_pos_bias.far is not model.rel_pos_bias.far
    torch.testing.assert_close(twin(image), model(image), rtol=0, atol=0.1)


def test_bad_input():
    with pytest.raises(ValueError, match="unknown rel_pos_extend 'crop': expected one of interpolate, extend"):
        make(rel_pos_extend='crop')
