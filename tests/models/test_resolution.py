import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

from nprf_vit.layers import resize_table

from .small import SMALL, make

SIZES = [(32, 32), (96, 96), (32, 80), (128, 48), (16, 16)]
VARIANTS = [
    {},
    {'rel_pos': 'layer'},
    {'rel_pos': 'none'},
    {'kernel': 'softmax'},
    {'kernel': 'softmax', 'rel_pos': 'none'},
]


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('kwargs', VARIANTS)
def test_set_input_size_and_dynamic_and_loading_agree(size, kwargs, tmp_path):
    trained = make(**kwargs)
    image = torch.randn(2, 3, *size)
    dynamic = make(dynamic_img_size=True, **kwargs)
    dynamic.load_state_dict(trained.state_dict())
    expected = dynamic(image)
    assert expected.isfinite().all()

    torch.save({'state_dict': trained.state_dict()}, tmp_path / 'trained.pth')
    loaded = timm.create_model(
        'nprf_deit_base', checkpoint_path=tmp_path / 'trained.pth', **{**SMALL, **kwargs, 'img_size': size}
    ).eval()
    torch.testing.assert_close(loaded(image), expected)

    trained.set_input_size(size)
    torch.testing.assert_close(trained(image), expected)
    assert trained.patch_embed.grid_size == (size[0] // 16, size[1] // 16)
    for parameter in trained.parameters():
        assert parameter.requires_grad and isinstance(parameter, torch.nn.Parameter)
    trained(image).sum().backward()
    assert all(p.grad is not None for p in trained.parameters())


def test_the_trained_grid_is_untouched(image):
    trained, dynamic = make(pos_embed='learn'), make(pos_embed='learn', dynamic_img_size=True)
    dynamic.load_state_dict(trained.state_dict())
    assert torch.equal(trained(image), dynamic(image))


def test_resizing_is_timms():
    model = make(rel_pos='none', pos_embed='learn')
    expected = resample_abs_pos_embed(model.pos_embed, (6, 3), (4, 4), num_prefix_tokens=0)
    model.set_input_size((96, 48))
    torch.testing.assert_close(model.pos_embed, expected)
    model = make()
    expected = resize_table(model.rel_pos_bias.table, (6, 3))
    model.set_input_size((96, 48))
    torch.testing.assert_close(model.rel_pos_bias.table, expected)
    model.set_input_size(patch_size=8)
    assert model.rel_pos_bias.table.shape == (2, 23, 11) and model(torch.randn(1, 3, 96, 48)).shape == (1, 5)


def test_same_number_of_patches_in_another_shape():
    for kwargs in VARIANTS:
        model = make(**kwargs)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        model.set_input_size((32, 128))
        for key in before:
            if key.endswith('table') or key == 'pos_embed':
                assert not torch.equal(before[key].flatten()[:8], model.state_dict()[key].flatten()[:8]), key


def test_dynamic_follows_training():
    model = make(dynamic_img_size=True, pos_embed='learn')
    image = torch.randn(2, 3, 96, 48)
    with torch.no_grad():
        first = model(image)
        torch.testing.assert_close(model(image), first)
    model.train()(image).sum().backward()
    torch.optim.SGD([model.rel_pos_bias.table, model.pos_embed], lr=1.0).step()
    with torch.no_grad():
        second = model.eval()(image)
    assert not torch.allclose(first, second, atol=1e-5)
    torch.testing.assert_close(second, model(image), msg='the same with and without a gradient')


def test_dynamic_padding():
    model = make(dynamic_img_size=True, dynamic_img_pad=True)
    image = torch.randn(1, 3, 50, 70)
    padded = torch.nn.functional.pad(image, (0, 10, 0, 14))
    torch.testing.assert_close(model(image), model(padded))


@pytest.mark.slow
@pytest.mark.parametrize(('pixels', 'limit'), [(1024, 3.0), (2048, 8.0)])
def test_memory_of_large_images(pixels, limit):
    """Peak resident memory of a forward of the base model, in GB, in a process of its own."""
    import subprocess
    import sys

    code = (
        'import resource, timm, torch, nprf_vit\n'
        f"model = timm.create_model('nprf_deit_base', img_size={pixels}).eval()\n"
        f'with torch.inference_mode(): assert model(torch.randn(1, 3, {pixels}, {pixels})).isfinite().all()\n'
        'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)\n'
    )
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert float(out.stdout) < limit
