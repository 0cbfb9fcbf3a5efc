"""Rows of attention before and after conversion, beside the dense reference."""

import pytest
import timm
import torch

import nprf_vit
from experiments.attention_rows import radius, row_errors
from nprf_vit.ops import reference

SMALL = {'img_size': 24, 'patch_size': 4, 'embed_dim': 32, 'depth': 1, 'num_heads': 2, 'num_classes': 10}


def softmax_model(**kwargs):
    torch.manual_seed(0)
    model = timm.create_model('nprf_deit_tiny', kernel='softmax', **SMALL, **kwargs).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize('kwargs', [{}, {'normalize': False}, {'rel_pos': 'none'}])
def test_errors_are_those_of_the_reference(kwargs):
    model, images = softmax_model(**kwargs), torch.randn(3, 3, 24, 24)
    other = nprf_vit.convert(model, 'prf', 8, 1)
    seen = []
    model.blocks[0].attn.register_forward_pre_hook(lambda attn, args: seen.append(attn.project(args[0])[:2]))
    with torch.inference_mode():
        model(images)
        (q, k), attn, grid = seen[0], other.blocks[0].attn, (6, 6)
        table = None if other.rel_pos_bias is None else other.rel_pos_bias.table.double()
        approximate = reference.attention_weights(
            *(x.double() for x in attn.features(q, k)), bias=table, grid_size=grid
        )
        if attn.normalize:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        else:
            q, k = (x * attn.head_dim**-0.25 for x in (q, k))
        scores = (q @ k.mT).exp()  # as if they were features with which no score is random
        position = 0.0 if table is None else reference.dense_bias(table, 36, grid)
        exact = scores.double() * torch.as_tensor(position).double().exp()
        exact = exact / exact.sum(-1, keepdim=True)
        expected = (exact - approximate).abs().sum(-1).mean().item()
    assert row_errors(model, [other], images) == [pytest.approx(expected, rel=1e-4)]
    assert 0.01 < expected < 2


def test_errors_fall_with_features_and_the_radius_is_of_the_kernel():
    model, images = softmax_model(), torch.randn(2, 3, 24, 24)
    few, many = (row_errors(model, [nprf_vit.convert(model, 'prf', m, 0)], images)[0] for m in (8, 2048))
    assert many < few / 4 and radius(model, images) == 1.0
    assert radius(softmax_model(normalize=False), images) > 1.2
