"""Patches that overlap, `stem='conv'`: the model around them is the same."""

import pytest
import timm
import torch

import nprf_vit  # noqa: F401  registers the models
from nprf_vit.layers import ConvPatchEmbed

SMALL = {'embed_dim': 32, 'depth': 2, 'num_heads': 2, 'num_classes': 5, 'patch_size': 4, 'stem': 'conv'}


def build(name='nprf_deit_tiny', **changes):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, 'img_size': 16, **changes}).eval()


@pytest.mark.parametrize('patch', [2, 4, 8])
def test_patches_are_as_many_and_see_their_neighbours(patch):
    model = build(patch_size=patch, img_size=32)
    convolutions = [m for m in model.patch_embed.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [c.stride for c in convolutions] == [(2, 2)] * (patch.bit_length() - 1)
    image = torch.randn(1, 3, 32, 32)
    tokens = model.patch_embed(image)
    assert tokens.shape == (1, 32 // patch, 32 // patch, 32)
    image.requires_grad_()
    (grad,) = torch.autograd.grad(convolutions[0](image)[0, :, 1, 1].sum(), image)
    assert grad[0, :, 1:4, 1:4].ne(0).all() and grad.count_nonzero() == 27


def test_a_patch_stem_is_timms():
    model = build(stem='patch')
    assert type(model.patch_embed) is timm.layers.PatchEmbed
    assert not any('proj.0' in name for name in model.state_dict())


def test_an_image_does_not_depend_on_its_batch():
    model, images = build().train(), torch.randn(4, 3, 16, 16)
    assert not any(isinstance(m, torch.nn.modules.batchnorm._NormBase) for m in model.modules())
    together = model(images)
    each = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', ['nprf_deit_tiny', 'softmax_deit_base', 'nprf_deit_base_distilled'])
def test_every_model_takes_it_and_learns_all_of_it(name):
    model = build(name).train()
    logits = model(torch.randn(2, 3, 16, 16))
    (sum(logits) if isinstance(logits, tuple) else logits).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.patch_embed.parameters())


def test_other_sizes(tmp_path):
    model = build(dynamic_img_size=True)
    assert model(torch.randn(1, 3, 24, 16)).shape == (1, 5)
    maps = build(features_only=True, out_indices=(0, 1), dynamic_img_size=True)(torch.randn(1, 3, 24, 32))
    assert [tuple(m.shape) for m in maps] == [(1, 32, 6, 8)] * 2
    model = build()
    model.set_input_size(img_size=32)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5) and model.rel_pos_bias.grid_size == (8, 8)
    torch.save(build().state_dict(), tmp_path / 'weights.pt')
    build(img_size=32, checkpoint_path=str(tmp_path / 'weights.pt'))


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"stem='cnv': expected one of \('patch', 'conv'\)"):
        build(stem='cnv')
    for changes, got in (({'patch_size': 6, 'img_size': 24}, '6x6'), ({'patch_size': (4, 2)}, '4x2')):
        with pytest.raises(ValueError, match=f'expected a square patch of 2, 4, 8, … pixels, got {got}'):
            build(**changes)
    with pytest.raises(ValueError, match="the patch size of a model with stem='conv' is fixed: expected 4x4, got 8"):
        build().set_input_size(patch_size=8)
    with pytest.raises(ValueError, match="stem='conv' is an embed_layer itself: expected stem='patch'"):
        build(embed_layer=ConvPatchEmbed)
    assert isinstance(build(stem='patch', embed_layer=ConvPatchEmbed).patch_embed, ConvPatchEmbed)
