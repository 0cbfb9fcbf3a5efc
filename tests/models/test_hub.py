"""A model that was resized after its creation, saved to a folder as for the Hub and created again from it."""

import json

import pytest
import timm
import torch
from timm.models._hub import save_for_hf

from .small import make

_input = pytest.importorskip('timm.models._input', reason='timm 1.0.30 notes no sizes: model_args are for the caller')

WAYS = ['interpolate', 'cells', 'extend', 'clip']


def reload(model, folder, **kwargs):
    save_for_hf(model, folder)
    return timm.create_model(f'local-dir:{folder}', pretrained=True, **kwargs).eval()


def assert_same(restored, model, size=(96, 96), in_chans=3):
    ours, theirs = model.state_dict(), restored.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    image = torch.randn(2, in_chans, *size)
    with torch.no_grad():
        assert torch.equal(restored(image), model(image))


@pytest.mark.parametrize('kwargs', [{}, {'rel_pos': 'layer'}, {'class_token': True, 'reg_tokens': 2}])
@pytest.mark.parametrize('way', WAYS)
def test_a_resized_model_comes_back(way, kwargs, tmp_path):
    model = make(rel_pos_extend=way, **kwargs)
    model.set_input_size(96)
    restored = reload(model, tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['model_args']['img_size'] == [96, 96] and config['pretrained_cfg']['input_size'] == [3, 96, 96]
    assert [b.grid_size for b in restored.bias_modules().values()] == [
        b.grid_size for b in model.bias_modules().values()
    ]
    assert_same(restored, model)


@pytest.mark.parametrize('kwargs', [{'rel_pos': 'none'}, {'kernel': 'softmax'}])
def test_so_do_models_without_a_bias_and_with_softmax(kwargs, tmp_path):
    model = make(**kwargs)
    model.set_input_size((96, 64))
    assert_same(reload(model, tmp_path), model, (96, 64))


@pytest.mark.parametrize('way', WAYS)
def test_a_table_of_a_size_of_its_own(way, tmp_path):
    model = make(rel_pos_extend=way, rel_pos_size=(3, 2))
    model.set_input_size(96)
    restored = reload(model, tmp_path)
    assert_same(restored, model)
    expected = (6, 6) if way == 'interpolate' else (3, 2)
    assert restored.rel_pos_bias.grid_size == expected
    restored.set_input_size(32)
    model.set_input_size(32)
    assert_same(restored, model, (32, 32))


def test_patches_channels_and_classes(tmp_path):
    model = make(in_chans=4)
    before = dict(model.pretrained_cfg)
    model.set_input_size(img_size=(48, 64), patch_size=8)
    model.reset_classifier(7)
    restored = reload(model, tmp_path)
    assert_same(restored, model, (48, 64), in_chans=4)
    assert model.pretrained_cfg == before and restored.num_classes == 7
    assert _input.get_model_input_config(restored)['input_size'] == (4, 48, 64)
    wider = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, in_chans=8)
    torch.testing.assert_close(wider.patch_embed.proj.weight, model.patch_embed.proj.weight.repeat(1, 2, 1, 1) / 2)


def test_traits_follow_the_model():
    model, other = make(), make()
    model.set_input_size((96, 32))
    assert _input.get_model_traits(model)['img_size'] == (96, 32)
    assert _input.get_model_args(model)['img_size'] == (96, 32)
    assert _input.get_model_traits(other)['img_size'] == (64, 64)
    assert 'rel_pos_size' not in _input.get_model_args(model)


def test_an_embedding_of_a_grid_that_is_not_square_is_resized(tmp_path):
    """The grid stands in what was saved beside the weights; of 24 tokens alone nobody knows."""
    model = make(rel_pos='none')
    model.set_input_size((96, 64))
    save_for_hf(model, tmp_path)
    restored = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, img_size=80).eval()
    model.set_input_size(80)
    assert_same(restored, model, (80, 80))


def test_the_distilled_model_comes_back(tmp_path):
    model = make('nprf_deit_base_distilled')
    model.set_input_size(96)
    assert_same(reload(model, tmp_path), model)


@pytest.mark.parametrize('pool', ['max', '', None])
def test_a_new_head_comes_back(pool, tmp_path):
    model = make()
    model.reset_classifier(0 if pool == '' else 3, global_pool=pool)
    assert_same(reload(model, tmp_path), model, (64, 64))


def test_training_regularization_is_not_saved(tmp_path):
    model = make(drop_rate=0.2, drop_path_rate=0.1, proj_drop_rate=0.1)
    restored = reload(model, tmp_path)
    drops = [m for m in restored.modules() if isinstance(m, torch.nn.Dropout)]
    assert drops and not any(m.p for m in drops)
    assert not any(isinstance(m, timm.layers.DropPath) and m.drop_prob for m in restored.modules())
