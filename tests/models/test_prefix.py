"""Models with class and register tokens beside a relative position bias."""

import pytest
import timm
import torch

from nprf_vit.layers import PrefixRelPosBias

from .small import SMALL, make

KINDS = {
    'class': {'class_token': True, 'global_pool': 'token'},
    'class, pooled': {'class_token': True, 'global_pool': 'avg'},
    'register': {'reg_tokens': 4},
    'both': {'class_token': True, 'reg_tokens': 2, 'global_pool': 'token'},
}
NEW = {'rel_pos_bias.token_to_prefix', 'rel_pos_bias.prefix_to_token', 'rel_pos_bias.prefix_to_prefix'}
EXTEND = ['interpolate', 'extend', 'cells']


def prefixed(kind='class', **kwargs):
    """A small model whose biases and tokens matter."""
    model = make(**{**KINDS[kind], **kwargs})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'prefix' in name or name.endswith('_token'):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def dense(monkeypatch, model, image):
    """The model's output with all weights stored, as an exporter would have it."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.onnx, 'is_in_onnx_export', lambda: True)
        return model(image)


@pytest.mark.parametrize('extend', EXTEND)
@pytest.mark.parametrize('rel_pos', ['shared', 'layer'])
@pytest.mark.parametrize('kind', KINDS)
def test_runs_and_trains(kind, rel_pos, extend, image, monkeypatch):
    model = prefixed(kind, rel_pos=rel_pos, rel_pos_extend=extend)
    out = model(image)
    torch.testing.assert_close(out, dense(monkeypatch, model, image), rtol=1e-4, atol=1e-5)
    out.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    biases = model.bias_modules()
    assert len(biases) == (1 if rel_pos == 'shared' else 3)
    assert all(isinstance(bias, PrefixRelPosBias) for bias in biases.values())
    assert {f'{name}.prefix_to_prefix' for name in biases} <= model.no_weight_decay()


@pytest.mark.parametrize('extend', EXTEND)
@pytest.mark.parametrize('rel_pos', ['shared', 'layer'])
@pytest.mark.parametrize('size', [(96, 128), (32, 48)])
def test_other_sizes(size, rel_pos, extend, monkeypatch):
    model = prefixed('both', rel_pos=rel_pos, rel_pos_extend=extend, dynamic_img_size=True)
    image = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(2))
    expected = dense(monkeypatch, model, image)
    dynamic = model(image)
    torch.testing.assert_close(dynamic, expected, rtol=1e-4, atol=1e-5)
    model.set_input_size(size)
    torch.testing.assert_close(model(image), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('rel_pos', ['shared', 'layer'])
def test_softmax_is_what_many_features_come_to(rel_pos, image):
    model = prefixed('both', rel_pos=rel_pos, kernel='softmax')
    twin = prefixed('both', rel_pos=rel_pos, feature_dim=4096)
    twin.load_state_dict({**twin.state_dict(), **model.state_dict()})
    with torch.no_grad():
        difference = (twin(image) - model(image)).norm() / model(image).norm()
    assert difference < 0.05


def test_new_names_in_the_state_dict_only_where_they_are_needed():
    plain, without = make(), make(class_token=True, rel_pos='none', global_pool='token')
    assert not any('prefix' in key for model in (plain, without) for key in model.state_dict())
    assert prefixed().state_dict().keys() - plain.state_dict().keys() == {'cls_token', *NEW}


def test_patch_dropout_needs_no_bias():
    with pytest.raises(ValueError, match='expected patch_drop_rate=0 with it'):
        make(patch_drop_rate=0.5)


@pytest.mark.parametrize('rel_pos', ['shared', 'layer'])
def test_intermediates_have_their_prefix_tokens(rel_pos, image):
    model = prefixed('both', rel_pos=rel_pos)
    peer = timm.create_model(
        'vit_tiny_patch16_224', **{k: v for k, v in SMALL.items() if k != 'feature_dim'}, reg_tokens=2
    )
    arguments = {'indices': [0, 2], 'return_prefix_tokens': True}
    (last, ours), (_, theirs) = (m.forward_intermediates(image, **arguments) for m in (model, peer))
    for (grid, prefix), (their_grid, their_prefix) in zip(ours, theirs):
        assert grid.shape == their_grid.shape == (2, 32, 4, 4)
        assert prefix.shape == their_prefix.shape == (2, 3, 32)
    assert torch.equal(last, model.forward_features(image))
    assert [x.shape for x in model.get_intermediate_layers(image, n=2)] == [(2, 16, 32)] * 2


@pytest.mark.parametrize('rel_pos', ['shared', 'layer'])
def test_features_only(rel_pos, image):
    options = {**SMALL, **KINDS['both'], 'rel_pos': rel_pos, 'features_only': True, 'out_indices': [1, 2]}
    model = timm.create_model('nprf_deit_base', **options).eval()
    assert [x.shape for x in model(image)] == [(2, 32, 4, 4)] * 2


@pytest.mark.parametrize('kernel', ['prf', 'softmax'])
@pytest.mark.parametrize('rel_pos', ['shared', 'layer'])
def test_masked_patches_change_nothing(rel_pos, kernel, image, monkeypatch):
    model = prefixed('both', rel_pos=rel_pos, kernel=kernel)
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[0, 2:], mask[1, :, 3] = False, False
    expected = model(image, attn_mask=mask)
    other = image.clone()
    other[0, :, 32:], other[1, :, :, 48:] = 7.0, float('nan')
    torch.testing.assert_close(model(other, attn_mask=mask), expected)
    assert not torch.allclose(model(image), expected, rtol=1e-3)
    with monkeypatch.context() as patch:
        patch.setattr(torch.onnx, 'is_in_onnx_export', lambda: True)
        torch.testing.assert_close(model(image, attn_mask=mask), expected, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(image):
    model, grads = prefixed('both', rel_pos='layer').train(), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        grads.append(torch.autograd.grad(model(image).square().sum(), list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize('extend', ['interpolate', 'extend'])
def test_other_checkpoints(extend, image, caplog):
    """From a model without such tokens, with fewer, and into one without."""
    plain, one, three = make(rel_pos_extend=extend), prefixed(rel_pos_extend=extend), prefixed('both', rel_pos='layer')
    one.load_state_dict(plain.state_dict())
    assert "added cls_token (the model's own), rel_pos_bias.token_to_prefix (zero)" in caplog.text
    assert all((one.state_dict()[name] == 0).all() for name in NEW)
    one, before = prefixed(rel_pos_extend=extend), len(caplog.records)
    given = one.state_dict()
    three.load_state_dict(given)
    assert (
        'resized blocks.*.attn.rel_pos_bias.token_to_prefix (1 to 3 prefix tokens, 1 of them the same)' in caplog.text
    )
    assert len(caplog.records) == before + 1
    for block in three.blocks:
        bias = block.attn.rel_pos_bias
        assert torch.equal(bias.token_to_prefix[:, 0], given['rel_pos_bias.token_to_prefix'][:, 0])
        assert torch.equal(bias.prefix_to_prefix[:, 0, 0], given['rel_pos_bias.prefix_to_prefix'][:, 0, 0])
        assert (bias.token_to_prefix[:, 1:] == 0).all() and (bias.prefix_to_prefix[:, 1:] == 0).all()
    plain.load_state_dict(given)
    assert torch.equal(plain.rel_pos_bias.table, one.rel_pos_bias.table)
    assert plain(image).isfinite().all()


def test_register_tokens_keep_theirs_without_the_class_token(caplog):
    both, registers = prefixed('both'), prefixed('register', reg_tokens=2)
    given = both.state_dict()
    registers.load_state_dict(given)
    assert torch.equal(registers.rel_pos_bias.token_to_prefix, given['rel_pos_bias.token_to_prefix'][:, 1:])
    assert torch.equal(registers.rel_pos_bias.prefix_to_prefix, given['rel_pos_bias.prefix_to_prefix'][:, 1:, 1:])


def test_a_class_token_does_not_take_the_biases_of_a_register(caplog):
    """As many tokens, of another kind: nothing but the grid's is the same."""
    one, register = prefixed(pos_embed='learn'), prefixed('register', reg_tokens=1, pos_embed='learn')
    own, given = one.pos_embed.detach().clone(), register.state_dict()
    one.load_state_dict(given)
    assert all((one.state_dict()[name] == 0).all() for name in NEW)
    assert torch.equal(one.rel_pos_bias.table, register.rel_pos_bias.table)
    assert torch.equal(one.pos_embed[:, :1], own[:, :1])
    assert torch.equal(one.pos_embed[:, 1:], register.pos_embed[:, 1:])


@pytest.mark.parametrize('rel_pos', ['none', 'shared'])
def test_position_embeddings_between_models_with_other_tokens(rel_pos, image, caplog):
    """Patches take theirs along, and of the other tokens those that both have."""
    options = {'rel_pos': rel_pos, 'pos_embed': 'learn'}
    plain, one, both = make(**options), prefixed(**options), prefixed('both', **options)
    for model in (one, both):
        own = model.pos_embed.detach().clone()
        prefix = model.num_prefix_tokens
        model.load_state_dict(plain.state_dict())
        assert torch.equal(model.pos_embed[:, prefix:], plain.pos_embed)
        assert torch.equal(model.pos_embed[:, :prefix], own[:, :prefix])
    one, own = prefixed(**options), both.pos_embed.detach().clone()
    with torch.no_grad():
        one.pos_embed.normal_()
    both.load_state_dict(one.state_dict())
    assert torch.equal(both.pos_embed, torch.cat([one.pos_embed[:, :1], own[:, 1:3], one.pos_embed[:, 1:]], dim=1))
    assert "added pos_embed (the model's own of prefix tokens)" in caplog.text
    plain.load_state_dict(both.state_dict())
    assert torch.equal(plain.pos_embed, both.pos_embed[:, 3:])
    assert all(model(image).isfinite().all() for model in (plain, one, both))


def test_half_precision_weights(image):
    model = prefixed('both')
    expected = model(image)
    out = model.to(torch.bfloat16)(image.to(torch.bfloat16))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
