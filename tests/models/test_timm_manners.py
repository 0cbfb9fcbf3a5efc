"""What users of timm expect of any vision transformer, each behaviour on our family."""

import copy

import pytest
import timm
import torch
from timm.layers import create_feature_extractor
from timm.models import group_parameters, load_pretrained
from timm.models._hub import save_for_hf
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay

from .small import SMALL, make

VARIANTS = [{}, {'rel_pos': 'layer'}, {'rel_pos': 'none'}, {'kernel': 'softmax'}]


@pytest.mark.parametrize('kwargs', [*VARIANTS, {'in_chans': 1}, {'patch_size': 8}, {'num_classes': 0}])
def test_forward(kwargs):
    model = make(**kwargs)
    image = torch.randn(2, kwargs.get('in_chans', 3), 64, 64)
    out = model(image)
    assert out.shape == (2, kwargs.get('num_classes', 5) or model.num_features)
    assert not out.isnan().any()
    tokens = model.forward_features(image)
    assert tokens.shape == (2, model.patch_embed.num_patches, model.num_features)
    torch.testing.assert_close(model.forward_head(tokens), out)


@pytest.mark.parametrize('global_pool', ['', 'avg', 'avgmax', 'max', 'map', 'prr'])
def test_global_pool(global_pool, image):
    model = make(global_pool=global_pool)
    out = model(image)
    assert out.shape == ((2, 16, 5) if global_pool == '' else (2, 5))
    tokens = model.forward_features(image)
    assert tokens.shape == (2, 16, 32)
    if global_pool == 'avg':
        torch.testing.assert_close(out, model.head(tokens.mean(1)))


def test_the_final_norm_comes_before_the_mean(image):
    model = make()
    torch.nn.init.uniform_(model.norm.weight, 0.5, 2)
    tokens = model.forward_intermediates(image, indices=1, output_fmt='NLC', intermediates_only=True)[0]
    torch.testing.assert_close(model(image), model.head(model.norm(tokens).mean(1)))
    assert isinstance(make(fc_norm=True).fc_norm, torch.nn.LayerNorm)


def test_classifier(image):
    model = make()
    assert model.get_classifier() is model.head and model.num_classes == 5
    model.reset_classifier(7)
    assert model(image).shape == (2, 7)
    model.reset_classifier(0)
    assert model(image).shape == (2, model.num_features) == (2, model.head_hidden_size)
    model.reset_classifier(0, '')
    assert model(image).shape == (2, 16, model.num_features)
    model.reset_classifier(3, 'max')
    assert model(image).shape == (2, 3)
    assert model.forward_head(model.forward_features(image), pre_logits=True).shape == (2, 32)


def test_default_cfg_names_what_exists():
    model = make()
    cfg, keys = model.pretrained_cfg, model.state_dict().keys()
    assert cfg['input_size'] == (3, 224, 224) and cfg['fixed_input_size'] and cfg['num_classes'] == 1000
    assert f'{cfg["classifier"]}.weight' in keys and f'{cfg["first_conv"]}.weight' in keys
    data = timm.data.resolve_data_config(model=timm.create_model('nprf_deit_tiny'))
    assert data['input_size'] == (3, 224, 224) and data['interpolation'] == 'bicubic' and data['crop_pct'] == 0.9


@pytest.mark.parametrize('kwargs', VARIANTS)
def test_features_only(kwargs):
    model = timm.create_model('nprf_deit_base', features_only=True, out_indices=(0, 2), **{**SMALL, **kwargs})
    assert model.feature_info.channels() == [32, 32] and model.feature_info.reduction() == [16, 16]
    out = model(torch.randn(2, 3, 64, 64))
    assert [o.shape for o in out] == [(2, 32, 4, 4)] * 2
    last = timm.create_model('nprf_deit_base', features_only=True, dynamic_img_size=True, **{**SMALL, **kwargs})
    assert [o.shape for o in last(torch.randn(1, 3, 32, 96))] == [(1, 32, 2, 6)] * 3
    short = timm.create_model('nprf_deit_base', features_only=True, out_indices=(0,), **{**SMALL, **kwargs})
    assert len(short.model.blocks) == 1, 'blocks after the last feature are pruned'


@pytest.mark.parametrize('kwargs', VARIANTS)
@pytest.mark.parametrize('norm', [False, True])
def test_forward_intermediates(kwargs, norm, image):
    model = make(**kwargs)
    final, nchw = model.forward_intermediates(image, norm=norm)
    nlc = model.forward_intermediates(image, norm=norm, output_fmt='NLC', intermediates_only=True)
    assert [o.shape for o in nchw] == [(2, 32, 4, 4)] * 3
    for a, b in zip(nchw, nlc):
        torch.testing.assert_close(a.flatten(2).transpose(1, 2), b)
    torch.testing.assert_close(final, model.forward_features(image))
    if norm:
        torch.testing.assert_close(nlc[-1], final)
    picked = model.forward_intermediates(image, [0, 1], norm=norm, stop_early=True, intermediates_only=True)
    torch.testing.assert_close(picked, nchw[:2])
    out = model.forward_intermediates(image, 1, norm=norm, output_dict=True)
    torch.testing.assert_close(out['image_intermediates'], nchw[-1:])
    torch.testing.assert_close(out['image_features'], final)
    dino = model.get_intermediate_layers(image, 2, reshape=True, norm=norm)
    torch.testing.assert_close(dino, nchw[1:])


def test_forward_intermediates_off_square():
    model = make(dynamic_img_size=True)
    out = model.forward_intermediates(torch.randn(1, 3, 32, 96), intermediates_only=True)
    assert [o.shape for o in out] == [(1, 32, 2, 6)] * 3
    model = make(dynamic_img_size=True, dynamic_img_pad=True)
    out = model.forward_intermediates(torch.randn(1, 3, 33, 95), intermediates_only=True)
    assert [o.shape for o in out] == [(1, 32, 3, 6)] * 3
    with pytest.raises(ValueError, match="expected 'NCHW' or 'NLC'"):
        model.forward_intermediates(torch.randn(1, 3, 32, 32), output_fmt='NHWC')


@pytest.mark.parametrize('kwargs', VARIANTS)
def test_grad_checkpointing_changes_no_gradient(kwargs, image):
    grads = []
    model = make(**kwargs).train()
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(image).square().sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], msg=name)


@pytest.mark.parametrize(
    'kwargs', [*VARIANTS, {'rel_pos': 'none', 'dynamic_img_size': True}, {'dynamic_img_size': True}]
)
def test_fx_feature_extraction(kwargs, image):
    model = make(**kwargs)
    graph = create_feature_extractor(model, ['blocks.1', 'head'])
    out = graph(image)
    torch.testing.assert_close(out['head'], model(image))
    expected = model.forward_intermediates(image, [1], intermediates_only=True)[0]
    torch.testing.assert_close(out['blocks.1'].permute(0, 3, 1, 2), expected)
    out['head'].sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    if 'dynamic_img_size' in kwargs:
        other = torch.randn(1, 3, 96, 32)
        torch.testing.assert_close(graph(other)['head'], model(other))
    features = timm.create_model('nprf_deit_base', features_only=True, feature_cls='fx', **{**SMALL, **kwargs})
    assert len(features(image)) == 3


@pytest.mark.parametrize('kwargs', VARIANTS)
def test_no_weight_decay(kwargs):
    model = make(**kwargs)
    tables = {n for n, _ in model.named_parameters() if n.endswith('table')}
    assert len(tables) == {None: 1, 'layer': 3, 'none': 0}[kwargs.get('rel_pos')]
    assert tables <= model.no_weight_decay()
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(p) for g in groups if g['weight_decay'] for p in g['params']}
    for name, parameter in model.named_parameters():
        expected = parameter.ndim > 1 and name not in tables and name != 'pos_embed'
        assert (id(parameter) in decayed) == expected, name
    create_optimizer_v2(model, opt='adamw', lr=1e-3, weight_decay=0.05)


@pytest.mark.parametrize('kwargs', VARIANTS)
def test_layer_decay_groups(kwargs):
    model = make(**kwargs)
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert groups['patch_embed.proj.weight'] == 0
    assert groups['blocks.0.attn.qkv.weight'] == 1 and groups['blocks.2.mlp.fc2.bias'] == 3
    assert groups['head.weight'] > groups['norm.weight'] == 3
    for name in groups:
        if name.endswith('table'):
            assert groups[name] == (int(name.split('.')[1]) + 1 if name.startswith('blocks') else 0)
    param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.65)


@pytest.mark.parametrize('kwargs', [*VARIANTS, {'kernel': 'orf'}])
@pytest.mark.parametrize('weight_init', ['', 'jax', 'moco', 'reset'])
def test_meta_device_then_init_weights(kwargs, weight_init, image):
    kwargs = {**SMALL, **kwargs, 'weight_init': weight_init}
    with torch.device('meta'):
        model = timm.create_model('nprf_deit_base', **kwargs)
    assert all(t.is_meta for t in model.state_dict().values())
    model = model.to_empty(device='cpu')
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float('nan'))
    model.init_weights(needs_reset=True)
    assert all(t.isfinite().all() for t in model.state_dict().values())
    usual = timm.create_model('nprf_deit_base', **kwargs)
    for name, buffer in usual.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
    for name, parameter in usual.named_parameters():
        ours = model.get_parameter(name)
        torch.testing.assert_close(ours.std(), parameter.std(), atol=0.01, rtol=0.5, msg=name)
    assert model.eval()(image).isfinite().all()


def test_bias_tables_start_small():
    model = timm.create_model('nprf_deit_tiny')
    table = model.rel_pos_bias.table
    assert table.shape == (3, 27, 27) and abs(table.std().item() - 0.02) < 0.002 and table.abs().max() < 0.2


@pytest.mark.parametrize('kwargs', VARIANTS)
def test_save_for_hf_and_local_dir(kwargs, image, tmp_path):
    model = make(**kwargs)
    args = {**SMALL, **kwargs}
    save_for_hf(model, str(tmp_path), model_args=args, safe_serialization=True)
    assert (tmp_path / 'model.safetensors').exists() and not (tmp_path / 'pytorch_model.bin').exists()
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    torch.testing.assert_close(loaded(image), model(image))
    fewer = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, num_classes=2).eval()
    assert fewer(image).shape == (2, 2)
    grey = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, in_chans=1).eval()
    assert grey(image[:, :1]).shape == (2, 5)


def test_pretrained_from_a_file(image, tmp_path):
    model = make()
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    overlay = {'file': str(tmp_path / 'weights.pth'), 'num_classes': 5}
    loaded = timm.create_model('nprf_deit_base', pretrained=True, pretrained_cfg_overlay=overlay, **SMALL).eval()
    torch.testing.assert_close(loaded(image), model(image))
    other = make(num_classes=3)
    load_pretrained(other, {**model.pretrained_cfg, **overlay}, num_classes=3)
    torch.testing.assert_close(other.forward_features(image), model.forward_features(image))


def test_copies_and_ema(image):
    model = make(dynamic_img_size=True)
    with torch.no_grad():
        model(torch.randn(1, 3, 96, 96))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(image), model(image))
    ema = timm.utils.ModelEmaV3(model, decay=0.5)
    with torch.no_grad():
        model.rel_pos_bias.table.add_(1)
    ema.update(model)
    torch.testing.assert_close(ema.module.rel_pos_bias.table, model.rel_pos_bias.table - 0.5)


@pytest.mark.parametrize('kwargs', VARIANTS)
def test_reduced_precision_models(kwargs, image):
    model = make(**kwargs)
    expected = model(image)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        torch.testing.assert_close(model(image).float(), expected, atol=0.05, rtol=0.05)
    out = model.to(torch.bfloat16)(image.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.1)
    typed = make(dtype=torch.bfloat16, **kwargs)
    assert typed.rel_pos_bias is None or typed.rel_pos_bias.table.dtype == torch.bfloat16
    assert typed(image.bfloat16()).isfinite().all()


def test_state_dict_keys_are_timms_plus_two():
    with torch.device('meta'):
        theirs = set(timm.create_model('deit_tiny_patch16_224').state_dict())
        ours = set(timm.create_model('nprf_deit_tiny').state_dict())
    assert theirs - ours == {'cls_token', 'pos_embed'}
    assert {k.split('.')[-1] for k in ours - theirs} == {'w', 'table'}
