"""rel_pos_extend='cells': the learned table as the bias between cells of a larger grid."""

import logging

import pytest
import timm
import torch

import nprf_vit
from nprf_vit.layers import resize_table
from nprf_vit.ops import reference

from .small import SMALL, make

LARGER = [(96, 96), (64, 80), (160, 112), (128, 128)]
SMALLER = [(32, 32), (16, 16), (48, 64)]
VARIANTS = [{}, {'rel_pos': 'layer'}, {'kernel': 'softmax'}, {'kernel': 'trf'}, {'pos_embed': 'learn'}]
KINDS = ['interpolate', 'extend', 'cells']


def cells(**kwargs):
    return make(rel_pos_extend='cells', **kwargs)


def line_of(caplog) -> str:
    return [r.getMessage() for r in caplog.records if r.name == 'nprf_vit.models.state_dicts'][-1]


@pytest.mark.parametrize('kwargs', VARIANTS)
def test_at_the_trained_grid_nothing_changes(kwargs, image):
    model, other = make(**kwargs), cells(**kwargs)
    other.load_state_dict(model.state_dict())
    assert model.state_dict().keys() == other.state_dict().keys()
    assert torch.equal(model(image), other(image))


@pytest.mark.parametrize('size', LARGER + SMALLER)
@pytest.mark.parametrize('kwargs', VARIANTS)
def test_every_way_to_another_grid_agrees(size, kwargs, tmp_path):
    trained = cells(**kwargs)
    image = torch.randn(2, 3, *size)
    dynamic = cells(dynamic_img_size=True, **kwargs)
    dynamic.load_state_dict(trained.state_dict())
    expected = dynamic(image)
    assert expected.isfinite().all()

    torch.save({'state_dict': trained.state_dict()}, tmp_path / 'trained.pth')
    options = {**SMALL, **kwargs, 'img_size': size, 'rel_pos_extend': 'cells'}
    loaded = timm.create_model('nprf_deit_base', checkpoint_path=tmp_path / 'trained.pth', **options).eval()
    torch.testing.assert_close(loaded(image), expected)

    built = cells(rel_pos_size=4, **kwargs, img_size=size)
    built.load_state_dict(loaded.state_dict())
    torch.testing.assert_close(built(image), expected)

    trained.set_input_size(size)
    torch.testing.assert_close(trained(image), expected)
    for bias in trained.bias_modules().values():
        assert bias.table.shape == (2, 7, 7)


@pytest.mark.parametrize('size', SMALLER)
def test_below_the_trained_grid_it_interpolates(size):
    model, other = make(dynamic_img_size=True), cells(dynamic_img_size=True)
    other.load_state_dict(model.state_dict())
    image = torch.randn(2, 3, *size)
    torch.testing.assert_close(other(image), model(image))


@pytest.mark.parametrize('backend', ['auto', 'direct', 'cells'])
@pytest.mark.parametrize('grid', [(7, 5), (6, 4), (9, 2), (2, 9)], ids=str)
def test_the_layer_attends_as_the_dense_oracle_does(grid, backend):
    layer = nprf_vit.layers.KernelAttention(
        32, 2, rel_pos_size=(3, 2), rel_pos_extend='cells', attn_backend=backend, dtype=torch.float64
    )
    torch.nn.init.normal_(layer.rel_pos_bias.table)
    x = torch.randn(2, *grid, 32, dtype=torch.float64)
    q, k, v = layer.project(x)
    between = tuple(map(min, grid, (3, 2)))
    table = resize_table(layer.rel_pos_bias.table, between)
    z = reference.attention(*layer.features(q, k), v, bias=table, grid_size=grid, cells=between)
    torch.testing.assert_close(layer(x), layer.proj(z.transpose(1, 2).reshape(x.shape)))


def test_a_layer_on_a_sequence():
    layer = nprf_vit.layers.KernelAttention(32, 2, rel_pos_size=(5,), rel_pos_extend='cells', dtype=torch.float64)
    torch.nn.init.normal_(layer.rel_pos_bias.table)
    x = torch.randn(2, 13, 32, dtype=torch.float64)
    q, k, v = layer.project(x)
    z = reference.attention(*layer.features(q, k), v, bias=layer.rel_pos_bias.table, cells=5)
    torch.testing.assert_close(layer(x), layer.proj(z.transpose(1, 2).reshape(x.shape)))


def test_softmax_gets_the_gathered_bias():
    bias = nprf_vit.layers.RelPosBias((3, 2), 2, dense=True, extend='cells')
    torch.nn.init.normal_(bias.table)
    torch.testing.assert_close(
        bias((7, 5)).matrix, reference.dense_bias(bias.table, 35, (7, 5), cells=(3, 2)), rtol=0, atol=0
    )


def test_fine_tuning_trains_the_table():
    model = cells(num_classes=0)
    before = model.rel_pos_bias.table.detach().clone()
    model.set_input_size((96, 80))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(0)
    model.train()(torch.randn(2, 3, 96, 80)).square().sum().backward()
    assert model.rel_pos_bias.table.grad.abs().min() > 0
    optimizer.step()
    assert not torch.equal(model.rel_pos_bias.table, before)
    assert 'rel_pos_bias.table' in model.no_weight_decay()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('other', KINDS)
@pytest.mark.parametrize('rel_pos', ['shared', 'layer'])
def test_checkpoints_of_all_kinds_load_into_each_other(kind, other, rel_pos, image):
    source, target = make(rel_pos_extend=kind), make(rel_pos_extend=other, rel_pos=rel_pos, img_size=96)
    target.load_state_dict(source.state_dict())
    for bias in target.bias_modules().values():
        if other == 'interpolate':
            torch.testing.assert_close(bias.table, resize_table(source.rel_pos_bias.table, (6, 6)))
        else:
            assert torch.equal(bias.table, source.rel_pos_bias.table)
    assert target(torch.randn(1, 3, 96, 96)).isfinite().all()
    back = make(rel_pos_extend=kind)
    back.load_state_dict(source.state_dict())
    assert torch.equal(back(image), source(image))


def test_the_lines_about_a_checkpoint_of_another_grid(caplog):
    source = make()
    with caplog.at_level(logging.WARNING):
        cells(img_size=96).load_state_dict(source.state_dict())
    assert 'kept rel_pos_bias.table ((7, 7), between cells instead of (11, 11))' in line_of(caplog)
    for count, size in ((5, 9), (3, 5)):  # more cells than were learned, and fewer
        caplog.clear()
        model = cells(img_size=96, rel_pos_size=count)
        with caplog.at_level(logging.WARNING):
            model.load_state_dict(source.state_dict())
        assert f'resized rel_pos_bias.table ((7, 7) to ({size}, {size}))' in line_of(caplog)
        torch.testing.assert_close(model.rel_pos_bias.table, resize_table(source.rel_pos_bias.table, (count,) * 2))


def test_one_cell_per_token_is_interpolating():
    image = torch.randn(2, 3, 96, 96)
    model, other = make(img_size=96), cells(img_size=96, rel_pos_size=6)
    state = make().state_dict()
    model.load_state_dict(state)
    other.load_state_dict(state)
    torch.testing.assert_close(other(image), model(image))


def test_an_optimizer_made_before_loading_still_trains_the_table():
    model = cells(img_size=96)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.load_state_dict(make().state_dict())
    before = model.rel_pos_bias.table.detach().clone()
    model.train()(torch.randn(2, 3, 96, 96)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.rel_pos_bias.table, before)


def test_grad_checkpointing_and_features():
    model = cells(dynamic_img_size=True)
    image = torch.randn(1, 3, 80, 112)
    plain = model(image)
    model.set_grad_checkpointing()
    again = model.train()(image)
    torch.testing.assert_close(again, plain)
    again.sum().backward()
    assert model.rel_pos_bias.table.grad.any()
    options = {**SMALL, 'features_only': True, 'dynamic_img_size': True, 'rel_pos_extend': 'cells'}
    features = timm.create_model('nprf_deit_base', **options)
    assert [tuple(f.shape) for f in features(image)] == [(1, 32, 5, 7)] * 3


def test_conversion_keeps_the_cells():
    model = cells(kernel='softmax', dynamic_img_size=True)
    twin = nprf_vit.convert(model, feature_dim=2048)
    image = torch.randn(1, 3, 96, 64)
    torch.testing.assert_close(twin(image), model(image), rtol=0, atol=0.1)


def test_a_bias_between_cells_is_no_table_of_offsets():
    bias = nprf_vit.layers.RelPosBias((3, 2), 2, extend='cells')
    assert bias.whole_table() is bias.table
    with pytest.raises(ValueError, match=r'between \(3, 2\) cells is no table of the offsets of \(5, 4\)'):
        bias.whole_table((5, 4))
