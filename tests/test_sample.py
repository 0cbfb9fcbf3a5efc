"""Drawing and completing images from cached states."""

import resource
import signal
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import nprf_vit  # noqa: F401  registers the models
from nprf_vit.config.yaml_file import make_config
from nprf_vit.engine.checkpoint.file import save_checkpoint
from nprf_vit.errors import Exit, InputError
from nprf_vit.models.pixel import to_raster
from nprf_vit.models.pixel_generation import PixelDecoder
from nprf_vit.sample import choose, draw_grid, generate, load_model, main

from .engine.running import in_child

KWARGS = {'levels': 17, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'feature_dim': 4}
CONFIG = {
    'task': 'pixel',
    'model': 'nprf_pixel_imagenet32',
    'model_kwargs': KWARGS,
    'img_size': 4,
    'in_chans': 1,
    'eval_metric': 'bpd',
    'dataset': 'digits',
}


def make(in_chans=1, **kwargs):
    torch.manual_seed(1)
    model = timm.create_model('nprf_pixel_imagenet32', **{**KWARGS, 'img_size': 4, 'in_chans': in_chans, **kwargs})
    torch.nn.init.normal_(model.embed.weight)
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


@pytest.fixture
def checkpoint(tmp_path):
    state = make().state_dict()
    ema = {**state, 'head.weight': -state['head.weight']}
    content = {'format': 2, 'config': make_config(CONFIG).to_dict(), 'step': 1}
    save_checkpoint({**content, 'state_dict': state, 'state_dict_ema': ema}, tmp_path / 'model.pt')
    return tmp_path / 'model.pt'


def test_generated_bytes_are_those_of_the_whole_model():
    """Each byte is the one that teacher forcing on the finished image would choose with the same random numbers."""
    model = make(in_chans=3)
    images = generate(model, 5, temperature=0.8, seed=4)
    uniform = torch.rand(5, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = model(images)
    expected = torch.stack([choose(logits[:, t], 0.8, uniform[:, t]) for t in range(48)], dim=1)
    assert torch.equal(to_raster(images), expected)
    assert len(images.unique()) > 5


def test_batches_seeds_and_temperature():
    model = make()
    whole = generate(model, 5, seed=1)
    assert torch.equal(generate(model, 5, seed=1, batch=2), whole)
    assert not torch.equal(generate(model, 5, seed=2), whole)
    cold = generate(model, 3, temperature=0.0)
    assert torch.equal(cold[0], cold[1]) and torch.equal(cold, generate(model, 3, temperature=0.0, seed=9))


def test_choice_follows_the_distribution():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(10_000, 4)
    uniform = (torch.arange(10_000) + 0.5) / 10_000
    assert choose(logits, 1.0, uniform).bincount().tolist() == [1000, 2000, 3000, 4000]
    assert choose(logits[:2], 1.0, torch.tensor([0.0, 1.0])).tolist() == [0, 3]
    assert choose(logits, 0.0, uniform).unique().tolist() == [3]
    sharp = choose(logits, 0.5, uniform).bincount() / 10_000
    np.testing.assert_allclose(sharp, np.array([1, 4, 9, 16]) / 30, atol=1e-3)


def test_completion_keeps_what_is_known():
    model = make(in_chans=3)
    known = torch.randint(17, (4, 24))
    images = generate(model, 4, known=known)
    assert torch.equal(to_raster(images)[:, :24], known)
    assert not torch.equal(to_raster(images)[:, 24:], to_raster(generate(model, 4))[:, 24:])


def test_command_line(checkpoint, tmp_path, capsys):
    out = tmp_path / 'samples.png'
    args = ['--checkpoint', str(checkpoint), '--output', str(out), '--seed', '3']
    assert main([*args, '--num', '5']) == 0
    assert f'wrote {out}' in capsys.readouterr().out
    drawn = np.asarray(Image.open(out))
    assert drawn.shape == (2 * 66 + 2, 3 * 66 + 2)  # five in a 3×2 grid, 4×4 enlarged to 64×64
    expected = draw_grid(generate(load_model(str(checkpoint)), 5, seed=3), 17, 3)
    assert np.array_equal(drawn, np.asarray(expected))
    assert main([*args, '--num', '5', '--no-ema']) == 0
    assert not np.array_equal(np.asarray(Image.open(out)), drawn)


def test_completion_on_the_command_line(checkpoint, tmp_path):
    given = np.random.default_rng(0).integers(17, size=(4, 4))
    Image.fromarray(np.rint(given * 255 / 16).astype(np.uint8)).save(tmp_path / 'in.png')
    out = tmp_path / 'out.png'
    args = ['--checkpoint', str(checkpoint), '--output', str(out), '--num', '2', '--complete', str(tmp_path / 'in.png')]
    assert main(args) == 0
    sheet = np.asarray(Image.open(out))
    tiles = [sheet[2 + 8 : 66 : 16, 2 + 66 * i + 8 : 66 * (i + 1) : 16] for i in range(3)]  # one pixel of each square
    assert np.array_equal(np.rint(tiles[0] * (16 / 255)), given)
    for tile in tiles[1:]:
        assert np.array_equal(tile[:2], tiles[0][:2]) and not np.array_equal(tile[2:], tiles[0][2:])


def test_bad_input(checkpoint, tmp_path, capsys):
    out = str(tmp_path / 'out.png')
    Image.new('L', (5, 4)).save(tmp_path / 'large.png')
    (tmp_path / 'text.png').write_text('no image')
    (tmp_path / 'folder.png').mkdir()
    Image.new('L', (4, 4)).save(tmp_path / 'eps.png', 'EPS')
    Image.new('1', (12_000, 12_000)).save(tmp_path / 'bomb.png')
    save_checkpoint({'format': 2, 'config': make_config({'model': 'nprf_deit_tiny'}).to_dict()}, tmp_path / 'other.pt')
    cases = {
        ('--num', '0'): '--num 0: expected at least 1',
        ('--num', '10000000000'): '10000000000 images in one picture; it has room for 20541 of this model',
        ('--num', '20541', '--complete', str(tmp_path / 'large.png')): 'images in one picture; it has room for 20541',
        ('--seed', str(2**64)): '--seed: expected a number from -9223372036854775808 to 18446744073709551615',
        ('--seed', '-' + '9' * 30): '--seed: expected a number from',
        ('--stall-timeout', 'nan'): '--stall-timeout nan: expected at least 1',
        ('--output', str(tmp_path / 'folder.png')): 'expected a .png file in a folder that exists',
        ('--complete', str(tmp_path / 'bomb.png')): 'bomb.png is 12000x12000, the model draws 4x4',
        ('--complete', str(tmp_path / 'eps.png')): 'cannot read the image',
        ('--temperature', 'nan'): '--temperature nan: expected at least 0',
        ('--output', str(tmp_path / 'no' / 'x.png')): 'expected a .png file in a folder that exists',
        ('--checkpoint', str(tmp_path / 'none.pt')): 'no checkpoint file',
        ('--checkpoint', str(tmp_path / 'other.pt')): 'is a model for classification: drawing needs one of pixels',
        ('--complete', str(tmp_path / 'none.png')): 'no image file',
        ('--complete', str(tmp_path / 'text.png')): 'cannot read the image',
        ('--complete', str(tmp_path / 'large.png')): 'large.png is 5x4, the model draws 4x4',
    }
    for extra, message in cases.items():
        assert main(['--checkpoint', str(checkpoint), '--output', out, *extra]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / 'out.png').exists()
    with pytest.raises(InputError, match='has 3 of the 16 bytes'):
        generate(make(length=3), 1)


@pytest.mark.parametrize('seed', ['-1', str(2**64 - 1)])
def test_extreme_seeds(checkpoint, tmp_path, seed):
    args = ['--checkpoint', str(checkpoint), '--output', str(tmp_path / 'out.png'), '--num', '1', '--seed', seed]
    assert main(args) == 0


def test_a_picture_that_cannot_be_written(checkpoint, tmp_path, capfd):
    """By a limit on the size of files, as a full disk would: the old picture stays."""
    out = tmp_path / 'out.png'
    args = ['--checkpoint', str(checkpoint), '--output', str(out), '--num', '400']
    assert main(args) == 0
    assert out.stat().st_size > 5000
    before = out.read_bytes()

    def full_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        return main([*args, '--seed', '9'])

    assert in_child(full_disk) == Exit.NOT_SAVED
    assert out.read_bytes() == before and [path.name for path in tmp_path.glob('*.png')] == ['out.png']
    assert f'error: cannot write {out}: File too large; the images are lost' in capfd.readouterr().err


def test_nobody_listens(checkpoint, tmp_path):
    def closed():
        sys.stdout = open('/dev/full', 'w')  # noqa: SIM115  for the rest of the process
        return main(['--checkpoint', str(checkpoint), '--output', str(tmp_path / 'out.png'), '--num', '1'])

    assert in_child(closed) == 0
    assert (tmp_path / 'out.png').exists()


def test_a_stall_ends(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(PixelDecoder, 'step', lambda *args: signal.pause())
    args = ['--checkpoint', str(checkpoint), '--output', str(tmp_path / 'out.png'), '--num', '1']

    def hang():
        sys.stderr = open(tmp_path / 'said', 'w')  # noqa: SIM115  for the rest of the process
        return main([*args, '--stall-timeout', '2'])

    assert in_child(hang) == Exit.STALLED
    assert 'stalled: rank 0 (forward' in (tmp_path / 'said').read_text()
