"""Plain `torch.fx.symbolic_trace` and torchvision's feature extractor, which do not know of timm's leaf modules."""

import pytest
import timm
import torch
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from .small import make

VARIANTS = [
    {},
    {'rel_pos': 'layer'},
    {'rel_pos': 'none', 'dynamic_img_size': True},
    {'kernel': 'softmax'},
    {'class_token': True, 'reg_tokens': 2},
    {'rel_pos_extend': 'cells', 'rel_pos_size': (2, 2), 'dynamic_img_size': True},
    {'rel_pos_extend': 'extend', 'rel_pos_size': (2, 2), 'dynamic_img_size': True, 'dynamic_img_pad': True},
    {'global_pool': 'map'},
]


def change_bias(model):
    """What a trained model does: a graph that holds a copy of the table would not follow."""
    with torch.no_grad():
        for module in model.bias_modules().values():
            module.table.mul_(-1)


@pytest.mark.parametrize('kwargs', VARIANTS, ids=str)
def test_symbolic_trace(kwargs, image):
    model = make(**kwargs)
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(image), model(image))
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[0, 2:] = False
    assert torch.equal(graph(image, mask), model(image, mask))
    assert not torch.equal(graph(image, mask), model(image))
    if 'dynamic_img_size' in kwargs:
        other = torch.randn(1, 3, 96, 32)
        assert torch.equal(graph(other), model(other))
    change_bias(model)
    assert torch.equal(graph(image), model(image))
    graph(image).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize('kwargs', VARIANTS, ids=str)
def test_torchvision_feature_extractor(kwargs, image):
    model = make(**kwargs)
    names = get_graph_node_names(model)[1]
    assert {'blocks.1.attn.run_whole', 'head'} <= set(names)
    out = create_feature_extractor(model, ['blocks.1', 'blocks.2.attn', 'head'])(image)
    assert torch.equal(out['head'], model(image))
    prefix = model.num_prefix_tokens
    expected = model.forward_intermediates(image, [1], output_fmt='NLC', intermediates_only=True)[0]
    assert torch.equal(out['blocks.1'].reshape(2, -1, 32)[:, prefix:], expected)
    assert out['blocks.2.attn'].shape == out['blocks.1'].shape


def test_the_distilled_model(image):
    model = make('nprf_deit_base_distilled')
    assert torch.equal(torch.fx.symbolic_trace(model)(image), model(image))


@pytest.mark.parametrize('name', ['nprf_pixel_imagenet32', 'softmax_pixel_imagenet32', 'prf_pixel_imagenet32'])
def test_pixel_models(name):
    model = timm.create_model(name, img_size=3, embed_dim=16, depth=1, num_heads=2, feature_dim=4).eval()
    x = torch.randint(0, 256, (2, 3, 3, 3), dtype=torch.uint8)
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(x), model(x))
    if model.rel_pos_bias is not None:
        with torch.no_grad():
            model.rel_pos_bias.table.normal_()
        assert torch.equal(graph(x), model(x))


def test_a_wrong_size_is_refused_by_the_graph(image):
    graph = torch.fx.symbolic_trace(make())
    with pytest.raises(ValueError, match='does not match img_size'):
        graph(torch.randn(1, 3, 96, 96))
