"""timm's `checkpoint_filter_fn`: where its tools look for it, and that it does what loading does anyway."""

import pytest
import timm
import torch

from nprf_vit.models import KernelVisionTransformer, distilled, kernel_deit, nprf_deit

from .small import make


def assert_same(model, other, size=(96, 96)):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    image = torch.randn(2, 3, *size)
    with torch.no_grad():
        assert torch.equal(model(image), other(image))


def test_the_filter_is_where_tools_look():
    for module in (kernel_deit, distilled, nprf_deit):
        assert module.checkpoint_filter_fn is kernel_deit.checkpoint_filter_fn
    assert KernelVisionTransformer.__module__ == kernel_deit.__name__


@pytest.mark.parametrize('wrapped', [None, 'model', 'state_dict'])
@pytest.mark.parametrize('way', ['interpolate', 'cells', 'extend', 'clip'])
def test_the_filter_does_what_loading_does(way, wrapped):
    """A model of 64 px through the filter into one of 96 px, as `set_input_size` would have made it."""
    model = make(rel_pos_extend=way)
    given = model.state_dict()
    names = list(given)
    filtered, loaded = make(rel_pos_extend=way, img_size=96), make(rel_pos_extend=way, img_size=96)
    weights = kernel_deit.checkpoint_filter_fn({wrapped: given} if wrapped else given, filtered)
    assert list(given) == names
    filtered.load_state_dict(weights)
    loaded.load_state_dict(given)
    assert_same(filtered, loaded)
    model.set_input_size(96)
    assert_same(filtered, model)


def test_the_filter_takes_the_weights_of_deit():
    theirs = timm.create_model('deit_tiny_patch16_224', embed_dim=32, depth=3, num_heads=2, img_size=64, num_classes=5)
    ours = make()
    ours.load_state_dict(kernel_deit.checkpoint_filter_fn({'model': theirs.state_dict()}, ours))
    assert torch.equal(ours.blocks[1].attn.qkv.weight, theirs.blocks[1].attn.qkv.weight)


def test_a_resized_model_follows_its_dtype():
    model = make(rel_pos='layer').to(torch.bfloat16)
    model.set_input_size((96, 64))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.randn(1, 3, 96, 64, dtype=torch.bfloat16)).isfinite().all()


def test_load_checkpoint_with_the_filter(tmp_path):
    model = make()
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'weights.pth')
    other = make(img_size=96)
    timm.models.load_checkpoint(other, str(tmp_path / 'weights.pth'), filter_fn=kernel_deit.checkpoint_filter_fn)
    model.set_input_size(96)
    assert_same(other, model)
