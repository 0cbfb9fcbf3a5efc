"""`python -m nprf_vit.explore`: which models and images it takes, what the page holds, and what it refuses."""

import base64
import json
import math
import re
import zlib

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from nprf_vit.config.yaml_file import dump_config, make_config
from nprf_vit.explore.__main__ import main
from nprf_vit.explore.attention_rows import Quantized, dequantize
from nprf_vit.explore.views import Grid, choose_strides
from nprf_vit.html_page.build import build_page
from tests.engine.running import ROOT, run_here

DIGITS = ROOT / 'docs/results/digits/model.safetensors'
FASHION = ROOT / 'docs/results/fashion_mnist/model.safetensors'


def data_of(page):
    """What the page's scripts read."""
    text = page.read_text(encoding='utf-8')
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def numbers(text, dtype):
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


def rows_of(view, image=0):
    part = view['images'][image]
    queries = len(view['prefix']) + len(view['rows']) * len(view['columns'])
    shape = part['layers'], part['heads'], queries
    scale = torch.from_numpy(numbers(part['scale'], '<f4').copy()).reshape(*shape, 2)
    steps = torch.from_numpy(numbers(part['bytes'], np.uint8).copy()).reshape(*shape, -1)
    return dequantize(Quantized(steps, scale[..., 0], scale[..., 1]))


def photo(path, size=(90, 60)):
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(noise).save(path)
    return str(path)


def explore(tmp_path, *args):
    page = tmp_path / 'page.html'
    assert main([*map(str, args), '--output', str(page)]) == 0
    assert page.stat().st_size < 5e6
    return data_of(page)


def test_own_data_of_the_digits(tmp_path):
    data = explore(tmp_path, '--checkpoint', DIGITS)
    assert [view['grid'] for view in data['views']] == [[4, 4], [8, 8]]
    assert len(data['images']) == 4
    (bias,) = data['models'][0]['biases']
    assert bias['shape'] == [4, 7, 7] and len(numbers(bias['values'], '<f4')) == 4 * 49
    for view in data['views']:
        rows = rows_of(view)
        tokens = math.prod(view['grid'])
        assert rows.shape == (4, 4, tokens, tokens), 'every query of a small grid'
        assert (rows.sum(-1) - 1).abs().max() < tokens / 510
        (first, *_) = view['images'][0]['predictions']
        assert first['right'] and first['label'] == view['images'][0]['target']


def test_biases_of_every_layer_and_a_file(tmp_path):
    image = photo(tmp_path / 'shirt.png')
    data = explore(tmp_path, '--checkpoint', FASHION, '--image', image, '--img-size', 42)
    assert [view['grid'] for view in data['views']] == [[4, 4], [6, 6]]
    assert [bias['title'] for bias in data['models'][0]['biases']] == [f'layer {i}' for i in range(1, 5)]
    assert data['images'][0]['name'] == 'shirt.png'
    predictions = data['views'][0]['images'][0]['predictions']
    assert len(predictions) == 5 and predictions[0]['p'] >= predictions[1]['p']


def test_timm_vit_beside_its_twin(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', num_classes=7)
    torch.save(model.state_dict(), tmp_path / 'vit.pth')
    picture = photo(tmp_path / 'a.png')
    args = ('--model', 'vit_tiny_patch16_224', '--checkpoint', tmp_path / 'vit.pth', '--image', picture)
    data = explore(tmp_path, *args, '--convert', 'prf', '--feature-dim', 16, '--megabytes', 1)
    assert [view['model'] for view in data['views']] == [0, 1]
    assert all(view['prefix'] == ['class token'] and not data['models'][0]['biases'] for view in data['views'])
    left, right = (rows_of(view) for view in data['views'])
    assert left.shape == right.shape and left.shape[2] < 100, 'a grid of queries on a large one'
    assert not torch.allclose(left, right, atol=1e-3)


def test_two_checkpoints(tmp_path):
    """What convert_checkpoint writes: weights with their configuration beside them."""
    config = make_config(
        {'model': 'nprf_deit_tiny', 'img_size': 8, 'in_chans': 1, 'num_classes': 10, 'dataset': 'digits'}
    )
    small = {'patch_size': 2, 'embed_dim': 16, 'depth': 2, 'num_heads': 2}
    files = []
    for kernel in ('softmax', 'prf'):
        kwargs = {**small, 'kernel': kernel}
        model = timm.create_model('nprf_deit_tiny', img_size=8, in_chans=1, num_classes=10, **kwargs)
        files.append(tmp_path / f'{kernel}.safetensors')
        save_file(model.state_dict(), files[-1])
        text = dump_config(make_config({**config.to_dict(), 'model_kwargs': kwargs, 'mean': [0.3], 'std': [0.37]}))
        files[-1].with_suffix('.yaml').write_text(text, encoding='utf-8')
    data = explore(tmp_path, '--checkpoint', files[0], '--compare', files[1])
    assert [model['name'] for model in data['models']] == ['softmax.safetensors', 'prf.safetensors']
    assert len(data['views']) == 2


@pytest.fixture(scope='module')
def pixel_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp('pixel')
    pixel = {'task': 'pixel', 'model': 'nprf_pixel_imagenet32', 'eval_metric': 'bpd', 'mean': None, 'std': None}
    off = {'scale': (0.08, 1.0), 'color_jitter': None, 'reprob': 0.0, 'mixup': 0.0, 'cutmix': 0.0, 'aug_repeats': 1}
    off |= {'smoothing': 0.0, 'crop_pct': 0.875, 'num_classes': None}
    kwargs = {'levels': 17, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'feature_dim': 8}
    run_here(folder, **pixel, **off, model_kwargs=kwargs, epochs=1, warmup_epochs=0, global_batch=512)
    return folder / 'best.pt'


def test_pixels(tmp_path, pixel_run):
    data = explore(tmp_path, '--checkpoint', pixel_run)
    assert data['pixel'] and [view['grid'] for view in data['views']] == [[8, 8]]
    image = data['views'][0]['images'][0]
    assert len(image['bits']) == 64 and len(image['completions']) == 4
    rows = rows_of(data['views'][0])  # 2, 2, 1 + 64, 1 + 64
    assert rows.shape == (2, 2, 65, 65)
    assert (rows.sum(-1) - 1).abs().max() < 65 / 510
    for pixel in range(64):  # byte t is predicted from the start and the bytes before it
        assert (rows[:, :, 1 + pixel, 1 + pixel :] == 0).all()


def test_bits_are_those_of_the_evaluation(tmp_path, pixel_run):
    from nprf_vit.explore.loading import Wanted, load
    from nprf_vit.explore.pictures import pictures_of_data
    from nprf_vit.explore.pixel_view import pixel_grid, pixel_view

    loaded = load(Wanted(str(pixel_run)))
    levels = pictures_of_data(loaded.config, 1)[0].content
    bits = pixel_view(loaded.model, pixel_grid(loaded.model), levels)['bits']
    log_p = loaded.model(levels[None])[0].log_softmax(-1)
    expected = [-log_p[t, value] / math.log(2) for t, value in enumerate(levels.flatten().tolist())]
    assert torch.allclose(torch.tensor(bits), torch.stack(expected).detach(), atol=1e-3)


def test_large_grids_are_thinned_alike():
    small, large = (4, Grid((4, 4))), (144, Grid((28, 28), ('class token',)))
    assert choose_strides([small, large, large], 10**9) == [1, 1, 1]
    strides = choose_strides([small, large, large], 4_000_000)
    assert strides[0] == 1 and strides[1] == strides[2] > 1
    grid = Grid((28, 28), ('class token',), strides[1])
    assert 2 * 144 * len(grid.queries()) * grid.tokens < 4_000_000
    assert choose_strides([large], 1) == [28] and len(Grid((28, 28), (), 28).queries()) == 1
    assert Grid((5, 3), ('class token',), 2).queries().tolist() == [0, 5, 11]


def test_a_name_cannot_leave_its_place(tmp_path):
    body = tmp_path / 'body.html'
    body.write_text('<p>')
    text = build_page('a<b', body, [], [], {'name': '</script><script>alert(1)</script>'})
    assert '</script><script>alert' not in text and '<title>a&lt;b</title>' in text


BAD = {
    'no checkpoint': (('--checkpoint', 'none.pt'), 'no checkpoint file none.pt'),
    'no image': (('--checkpoint', DIGITS, '--image', 'none.png'), 'no image file none.png'),
    'no data': (('--checkpoint', FASHION), 'give --image FILE'),
    'wrong size': (('--checkpoint', DIGITS, '--img-size', '9'), 'not divisible by the patch size 2x2'),
    'no folder': (('--checkpoint', DIGITS, '--output', 'none/page.html'), 'expected a file in a folder that exists'),
    'unknown model': (('--checkpoint', DIGITS, '--model', 'vitt'), 'unknown model vitt'),
    'another model': (('--checkpoint', DIGITS, '--model', 'vit_tiny_patch16_224'), 'checkpoint of another model'),
    'megabytes': (('--checkpoint', DIGITS, '--megabytes', '0'), 'expected 0.1 to 1000'),
    'huge size': (('--checkpoint', DIGITS, '--img-size', '99999'), 'expected 1 to 16384'),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input_is_one_line(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args, told = BAD[case]
    assert main([str(each) for each in args]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count('\n') == 1 and error.startswith('error: ')
    assert list(tmp_path.iterdir()) == []


def test_weights_that_do_not_say_their_model(tmp_path, capsys):
    save_file({'a': torch.zeros(1)}, tmp_path / 'weights.safetensors')
    assert main(['--checkpoint', str(tmp_path / 'weights.safetensors'), '--output', str(tmp_path / 'p.html')]) == 2
    assert 'give --model NAME of timm, or --config FILE' in capsys.readouterr().err


def test_an_image_that_is_none(tmp_path, capsys):
    (tmp_path / 'a.png').write_bytes(b'no picture')
    args = ['--checkpoint', str(DIGITS), '--image', str(tmp_path / 'a.png'), '--output', str(tmp_path / 'p.html')]
    assert main(args) == 2
    assert 'cannot read the image' in capsys.readouterr().err and not (tmp_path / 'p.html').exists()
