"""What the explorer shows are the rows of the matrix: those of the dense oracle, to the quantization."""

import math

import pytest
import timm
import torch

import nprf_vit
from nprf_vit.errors import InputError
from nprf_vit.explore.attention_rows import attention_rows, dequantize, quantize
from nprf_vit.layers import KernelAttention
from nprf_vit.ops import reference
from nprf_vit.ops.bias import PrefixedBias

SMALL = {'img_size': 20, 'patch_size': 4, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'num_classes': 3}


def small(name='nprf_deit_tiny', bias=1.0, **kwargs):
    torch.manual_seed(1)
    model = timm.create_model(name, **{**SMALL, **kwargs}).eval()
    for parameter_name, parameter in model.named_parameters():
        if 'rel_pos_bias' in parameter_name:
            torch.nn.init.normal_(parameter, std=bias)
        elif 'qkv' in parameter_name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def oracle_rows(model, images, flip=False):
    """All rows of all layers by ops/reference.py, in float64, from the inputs that the layers saw."""
    seen, handles = [], []
    for layer in model.modules():
        if isinstance(layer, KernelAttention):
            note = lambda m, args, kwargs: seen.append((m, args, kwargs.get('grid_size')))  # noqa: E731
            handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        model(images)
    [handle.remove() for handle in handles]
    return torch.stack([_dense(layer, *args, flip=flip, given=given) for layer, args, given in seen])


def _dense(layer, x, bias=None, flip=False, given=None):
    grid = tuple(x.shape[1:3]) if x.ndim == 4 else given
    if layer.rel_pos_bias is not None:
        bias = layer.rel_pos_bias(grid or (x.shape[1],))
    q, k, _ = (t.double() for t in layer.project(x))
    if layer.normalize:
        q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    else:
        q, k = (t * layer.head_dim**-0.25 for t in (q, k))
    if layer.kernel == 'softmax':
        scores = q @ k.transpose(-2, -1) + (0 if bias is None else bias.matrix.double())
        return scores.softmax(-1)[0]
    phi_q, phi_k = (reference.features(t, layer.w.double(), layer.kernel) for t in (q, k))
    if isinstance(bias, PrefixedBias):
        table, far, cells = (t.detach().double() if isinstance(t, torch.Tensor) else t for t in bias.grid)
        between = reference.dense_bias(table, math.prod(bias.grid_size), bias.grid_size, far, cells)
        matrix = reference.prefixed_bias(between, *(t.detach().double() for t in bias.prefix))
        return reference.matrix_attention_weights(phi_q, phi_k, matrix)[0]
    if bias is None:
        grid = None
    table, far, cells = bias or (None, None, None)
    if flip and table is not None:
        table = table.flip(-1)
    table, far = (t if t is None else t.detach().double() for t in (table, far))
    return reference.attention_weights(phi_q, phi_k, table, far, grid, layer.causal, cells)[0]


CASES = {
    'shared': {},
    'layer': {'rel_pos': 'layer'},
    'none': {'rel_pos': 'none'},
    'standard': {'normalize': False},
    'negative features': {'kernel': 'trf', 'feature_dim': 64},
    'softmax': {'kernel': 'softmax'},
    'extended': {'rel_pos_extend': 'extend', 'rel_pos_size': (2, 3)},
    'cells': {'rel_pos_extend': 'cells', 'rel_pos_size': (2, 3)},
    'not square': {'img_size': (12, 28)},
    'clipped': {'rel_pos_extend': 'clip', 'rel_pos_size': (2, 3)},
    'class token': {'rel_pos': 'none', 'class_token': True},
    'class token under a bias': {'class_token': True},
    'class token and registers': {'rel_pos': 'layer', 'class_token': True, 'reg_tokens': 2, 'img_size': (12, 28)},
    'class token and cells': {'class_token': True, 'rel_pos_extend': 'cells', 'rel_pos_size': (2, 3)},
    'class token, softmax': {'class_token': True, 'kernel': 'softmax'},
}


@pytest.mark.parametrize('case', CASES)
def test_rows_are_the_oracles(case):
    model = small(**CASES[case])
    images = torch.randn(1, 3, *model.patch_embed.img_size)
    tokens = model.num_prefix_tokens + model.patch_embed.num_patches
    queries = torch.arange(0, tokens, 3)
    output, rows = attention_rows(model, images, queries)
    expected = oracle_rows(model, images)[:, :, queries]
    assert rows.shape == (2, 2, len(queries), tokens)
    spread = expected.amax(-1) - expected.amin(-1).clamp(max=0)
    assert ((rows - expected).abs() <= 1e-4 * spread[..., None] + 1e-7).all()
    assert (rows.sum(-1) - 1).abs().max() < 1e-12
    shown = dequantize(quantize(rows))
    assert ((shown - expected).abs() <= spread[..., None] * (0.5 / 255 + 2e-4)).all()
    assert (shown.sum(-1) - 1).abs().max() < 0.5 / 255 * tokens * spread.max()
    assert torch.equal(output, model(images))


def test_a_flipped_table_is_noticed():
    model, images = small(), torch.randn(1, 3, 20, 20)
    rows = attention_rows(model, images, torch.arange(25)).rows
    wrong = oracle_rows(model, images, flip=True)
    assert ((rows - wrong).abs() > wrong.amax(-1)[..., None] / 255).any()


def test_timm_vit_and_its_twin():
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', **SMALL).eval()
    images, queries = torch.randn(1, 3, 20, 20), torch.arange(26)
    output, rows = attention_rows(model, images, queries)
    assert all(block.attn.fused_attn for block in model.blocks), 'the model is left as it was'
    assert torch.allclose(output, model(images), atol=1e-5)
    same = nprf_vit.convert(model, 'softmax')
    assert torch.allclose(rows, attention_rows(same, images, queries).rows, atol=1e-6)
    twin = nprf_vit.convert(model, 'prf', feature_dim=4096)
    near = attention_rows(twin, images, queries).rows
    assert (rows - near).abs().max() < 0.01 and not torch.allclose(rows, near, atol=1e-6)


def test_pixel_rows_do_not_look_ahead():
    torch.manual_seed(0)
    for kernel in ('prf', 'softmax'):
        sizes = {'img_size': 4, 'in_chans': 1, 'levels': 17, 'embed_dim': 16, 'depth': 2, 'num_heads': 2}
        model = timm.create_model('nprf_pixel_imagenet32', kernel=kernel, **sizes).eval()
        images = torch.randint(17, (1, 1, 4, 4))
        rows = attention_rows(model, images, torch.arange(16)).rows
        assert rows.triu(1).abs().max() == 0 and (rows.sum(-1) - 1).abs().max() < 1e-12
        if kernel == 'prf':
            assert (rows - oracle_rows(model, images)).abs().max() < 1e-5


@pytest.mark.parametrize('name', ['resnet18', 'swin_tiny_patch4_window7_224'])
def test_models_without_such_rows_are_refused(name):
    model = timm.create_model(name).eval()
    with pytest.raises(InputError, match='expected a'):
        attention_rows(model, torch.randn(1, 3, 224, 224), torch.arange(4))
