"""Empty batches through layers and models, images without values, and a parametrized bias table."""

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize

from nprf_vit.layers import KERNELS, KernelAttention
from nprf_vit.layers.rel_pos import resize_table

from .small import make

VARIANTS = [
    {},
    {'rel_pos': 'layer', 'rel_pos_extend': 'extend'},
    {'rel_pos_extend': 'cells', 'rel_pos_size': 2},
    {'rel_pos': 'none'},
    {'kernel': 'softmax'},
    {'normalize': False},
]


@pytest.mark.parametrize('kwargs', VARIANTS)
@pytest.mark.parametrize('masked', [False, True])
def test_models(kwargs, masked):
    model = make(**kwargs).train()
    mask = torch.ones(0, 4, 4, dtype=torch.bool) if masked else None
    out = model(torch.ones(0, 3, 64, 64), attn_mask=mask)
    assert out.shape == (0, 5)
    out.sum().backward()
    assert all((p.grad == 0).all() for p in model.parameters())
    maps = model.forward_intermediates(torch.ones(0, 3, 64, 64), intermediates_only=True)
    assert [m.shape for m in maps] == [(0, 32, 4, 4)] * 3


@pytest.mark.parametrize('kernel', KERNELS)
def test_layers(kernel):
    for shape, size in (((0, 3, 4, 16), (3, 4)), ((0, 12, 16), (12,)), ((0, 12, 16), None)):
        attn = KernelAttention(16, 2, kernel, feature_dim=8, rel_pos_size=size)
        x = torch.ones(shape, requires_grad=True)
        out = attn(x)
        out.sum().backward()
        assert out.shape == x.grad.shape == shape
        assert all((p.grad == 0).all() for p in attn.parameters())
    assert attn(torch.ones(0, 5, 16), context=torch.ones(0, 7, 16)).shape == (0, 5, 16)


def test_pixel_models():
    model = timm.create_model('nprf_pixel_imagenet32', img_size=4, embed_dim=16, depth=2, num_heads=2)
    out = model(torch.ones(0, 3, 4, 4, dtype=torch.uint8))
    assert out.shape[0] == 0
    out.sum().backward()


def test_pixel_models_without_values():
    options = {'img_size': 4, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'levels': 16}
    model = timm.create_model('nprf_pixel_imagenet32', **options)  # timm itself reads values while it builds
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.ones(2, 3, 4, 4, dtype=torch.uint8)).shape == (2, 48, 16)
    with pytest.raises(ValueError, match='levels 0..15'):
        model(torch.full((2, 3, 4, 4), 16, dtype=torch.uint8))


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('size', [96, 32])
@pytest.mark.parametrize('kwargs', [kwargs for kwargs in VARIANTS if 'kernel' not in kwargs])
def test_a_traced_model_at_another_size_says_so(kwargs, size, image):
    """Of another number of patches: a grid of as many in another form cannot be told from the traced one."""
    model = make(dynamic_img_size=True, pos_embed='none', **kwargs)
    with torch.no_grad():
        traced = torch.jit.trace(model, image)
        torch.testing.assert_close(traced(image), model(image))
        with pytest.raises((RuntimeError, ValueError), match='for a 4x4 grid|is invalid for input of size'):
            traced(torch.randn(2, 3, size, size))


class Symmetric(nn.Module):
    """The same bias for an offset and its opposite."""

    def forward(self, table):
        return (table + table.flip(1, 2)) / 2


@pytest.mark.parametrize('kwargs', [{}, {'rel_pos': 'layer'}, {'rel_pos_extend': 'extend'}])
def test_a_parametrized_table_survives_another_size(kwargs):
    model, plain = make(**kwargs), make(**kwargs)
    plain.load_state_dict(model.state_dict())
    for bias, other in zip(model.bias_modules().values(), plain.bias_modules().values()):
        parametrize.register_parametrization(bias, 'table', Symmetric())
        bias.parametrizations.table.original.requires_grad_(False)
        with torch.no_grad():
            other.table.copy_(bias.table)
    for m in (model, plain):
        m.set_input_size(96)
    image = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(model(image), plain(image))
    for bias in model.bias_modules().values():
        assert parametrize.is_parametrized(bias, 'table')
        original = bias.parametrizations.table.original
        assert isinstance(original, nn.Parameter) and not original.requires_grad
        torch.testing.assert_close(bias.table, bias.table.flip(1, 2))
        assert bias.whole_table((6, 6)).shape == (2, 11, 11)


def test_a_table_of_several_tensors_cannot_be_resized():
    model = make()
    parametrizations.weight_norm(model.rel_pos_bias, 'table')
    with pytest.raises(ValueError, match='table is parametrized by several tensors'):
        model.set_input_size(96)
    before = model.rel_pos_bias.table.detach().clone()
    parametrize.remove_parametrizations(model.rel_pos_bias, 'table')
    model.rel_pos_bias.set_grid_size((6, 6))
    torch.testing.assert_close(model.rel_pos_bias.table, resize_table(before, (6, 6)))
