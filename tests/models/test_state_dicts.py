"""State dicts of timm and of the original DeiT, and what the one line says about them."""

import logging

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

from .small import SMALL, make

DEIT = {k: v for k, v in SMALL.items() if k != 'feature_dim'}


def deit(name='deit_base_patch16_224', **kwargs):
    return timm.create_model(name, **{**DEIT, **kwargs}).eval()


def said(caplog):
    lines = [r.getMessage() for r in caplog.records if r.name == 'nprf_vit.models.state_dicts']
    assert len(lines) <= 1 and all('\n' not in line for line in lines)
    return lines[0] if lines else ''


def test_a_matching_state_dict_passes_in_silence(caplog, image):
    model, other = make(), make()
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(image), other(image)) and said(caplog) == ''


@pytest.mark.parametrize('name', ['prf_deit_base', 'softmax_deit_base', 'nprf_deit_base', 'nprf_deit_base_norpe'])
@pytest.mark.parametrize('distilled', [False, True])
@pytest.mark.parametrize('wrapped', [False, True])
def test_deit_loads(name, distilled, wrapped, caplog, tmp_path):
    source = deit('deit_base_distilled_patch16_224' if distilled else 'deit_base_patch16_224')
    state = source.state_dict()
    torch.save({'model': state} if wrapped else state, tmp_path / 'deit.pth')
    model = timm.create_model(name, checkpoint_path=tmp_path / 'deit.pth', **SMALL).eval()
    line = said(caplog)
    assert 'cls_token' in line and ('dist_token' in line) == ('head_dist.weight' in line) == distilled
    assert ("blocks.*.attn.w (the model's own)" in line) == ('softmax' not in name)
    for key, value in model.state_dict().items():
        if key in state and key != 'pos_embed':
            assert torch.equal(value, state[key]), key
    if name == 'nprf_deit_base':
        assert model.rel_pos_bias.table.count_nonzero() == 0 and 'rel_pos_bias.table (zero)' in line
        assert 'dropped' in line and 'pos_embed' in line
    else:
        assert torch.equal(model.pos_embed, state['pos_embed'][:, 2 if distilled else 1 :])


def test_deit_of_another_resolution(caplog):
    state = deit(img_size=96).state_dict()
    model = make('prf_deit_base')
    model.load_state_dict(state)
    expected = resample_abs_pos_embed(state['pos_embed'][:, 1:], (4, 4), (6, 6), num_prefix_tokens=0)
    torch.testing.assert_close(model.pos_embed, expected)
    assert 'resized pos_embed ((6, 6) to (4, 4))' in said(caplog)


def test_deit3_layer_scale_and_register_tokens():
    state = deit('deit3_base_patch16_224').state_dict()
    original = {k.replace('ls1.gamma', 'gamma_1').replace('ls2.gamma', 'gamma_2'): v for k, v in state.items()}
    model = make('prf_deit_base', init_values=1e-6)
    model.load_state_dict(original)
    assert torch.equal(model.blocks[1].ls2.gamma, state['blocks.1.ls2.gamma'])
    assert torch.equal(model.pos_embed, state['pos_embed'])
    registers = deit('vit_base_patch16_224', reg_tokens=4)
    model = make('softmax_deit_base')
    model.load_state_dict(registers.state_dict())
    assert torch.equal(model.pos_embed, registers.pos_embed[:, 5:])


def test_pooled_vit(image):
    source = deit('vit_base_patch16_224', global_pool='avg', class_token=False)
    assert 'fc_norm.weight' in source.state_dict()
    model = make('softmax_deit_base')
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(model.norm.weight, source.fc_norm.weight)
    a, b = (m.forward_intermediates(image, intermediates_only=True) for m in (model, source))
    torch.testing.assert_close(a, b)


def test_another_head_of_another_model_is_dropped(caplog):
    model = make(num_classes=3)
    head = model.head.weight.clone()
    model.load_state_dict(deit().state_dict())
    line = said(caplog)
    assert torch.equal(model.head.weight, head)
    assert 'dropped head.weight (5 classes)' in line and "kept head.weight (the model's own)" in line
    headless = make(num_classes=0)
    headless.load_state_dict(make().state_dict())


def test_another_head_of_the_same_family_is_an_error():
    with pytest.raises(RuntimeError, match='head.weight'):
        make(num_classes=3).load_state_dict(make().state_dict())


@pytest.mark.parametrize(
    ('source', 'target'),
    [({'feature_dim': 8}, {'feature_dim': 16}), ({'depth': 2}, {'depth': 3}), ({'embed_dim': 64}, {'embed_dim': 32})],
)
def test_what_does_not_fit_is_an_error(source, target):
    with pytest.raises(RuntimeError, match='blocks'):
        make(**target).load_state_dict(make(**source).state_dict())
    with pytest.raises(RuntimeError, match='Missing key'):
        make().load_state_dict({})
    with pytest.raises(RuntimeError, match='Unexpected key'):
        make().load_state_dict({**make().state_dict(), 'extra': torch.zeros(1)})


def test_a_grid_that_is_no_square_is_an_error():
    state = deit(img_size=(96, 48)).state_dict()
    with pytest.raises(ValueError, match='is no square grid'):
        make('prf_deit_base', img_size=128).load_state_dict(state)
    same = make('prf_deit_base', img_size=(96, 48))
    same.load_state_dict(state)
    assert torch.equal(same.pos_embed, state['pos_embed'][:, 1:])


def test_twins_convert_by_loading_alone(image, caplog):
    softmax, prf = make('softmax_deit_base'), make('prf_deit_base')
    prf.load_state_dict(softmax.state_dict())
    assert 'added blocks.*.attn.w' in said(caplog)
    back = make('softmax_deit_base')
    back.load_state_dict(prf.state_dict())
    assert torch.equal(back(image), softmax(image))


def test_a_shared_bias_becomes_one_per_layer(image):
    shared, layer = make(), make(rel_pos='layer')
    layer.load_state_dict(shared.state_dict())
    torch.testing.assert_close(layer(image), shared(image))
    back = make()
    back.load_state_dict(layer.state_dict())
    assert back.rel_pos_bias.table.count_nonzero() == 0


def test_another_patch_size(caplog):
    model = make('prf_deit_base', patch_size=8, img_size=32)
    model.load_state_dict(deit().state_dict())
    assert 'resized patch_embed.proj.weight ((16, 16) to (8, 8))' in said(caplog)


def test_inside_another_module(image):
    wrapped = torch.nn.Sequential(make('nprf_deit_base', img_size=96))
    source = make()
    wrapped.load_state_dict({f'0.{k}': v for k, v in source.state_dict().items()})
    assert wrapped[0].rel_pos_bias.table.shape == (2, 11, 11)


def test_assign_into_a_meta_model(image):
    with torch.device('meta'):
        model = timm.create_model('nprf_deit_base', **SMALL)
    source = deit()
    model.load_state_dict(source.state_dict(), assign=True)
    usual = make()
    usual.load_state_dict(source.state_dict())
    torch.testing.assert_close(model.eval()(image), usual(image))


def test_the_state_dict_of_the_caller_stays_as_it_is():
    state = deit().state_dict()
    keys = list(state)
    make().load_state_dict(state)
    assert list(state) == keys


def test_the_line_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        make().load_state_dict(deit().state_dict())
    assert said(caplog).startswith('KernelVisionTransformer adapted the checkpoint: ')


def test_a_part_of_a_model_resets_nothing(caplog):
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    head = {'head.weight': torch.zeros(5, 32), 'head.bias': torch.zeros(5)}
    result = model.load_state_dict(head, strict=False)
    assert 'rel_pos_bias.table' in result.missing_keys and said(caplog) == ''
    for key, value in model.state_dict().items():
        assert torch.equal(value, head.get(key, before[key])), key
