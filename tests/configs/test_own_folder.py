"""The example that trains on a folder of the user's own, and photographs in ImageNet's layout."""

import subprocess
import sys

import pytest
import timm
from PIL import Image

from examples.own_folder import find_images, fine_tune_keys, write_digits
from nprf_vit.config.yaml_file import load_config
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.csv_file import read_rows

from ..data.folders import CLASSES, digit_folder
from ..engine.running import ROOT
from .photographs import photograph_folder


def run(*args):
    command = [sys.executable, str(ROOT / 'examples' / 'own_folder.py'), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_folder_of_classes_is_split_and_trained_on(tmp_path):
    folder, out = digit_folder(tmp_path / 'mine', train=20) / 'train', tmp_path / 'out'
    (folder / 'digit2' / 'more').mkdir()
    (folder / 'digit2' / '003.png').rename(folder / 'digit2' / 'more' / '004.png')  # the name of another image
    keys = 'epochs=1', 'warmup_epochs=0', 'workers=0', 'img_size=16', 'global_batch=16'
    said = run(folder, '--output', out, '--set', *keys)
    parts = {
        split: sorted(path.resolve() for path in (out / 'data' / split).rglob('*.png')) for split in ('train', 'val')
    }
    assert len(parts['train']) + len(parts['val']) == 20 * CLASSES and 8 <= len(parts['val']) <= 24
    assert sorted(parts['train'] + parts['val']) == sorted(path.resolve() for path in folder.rglob('*.png'))
    assert f'{CLASSES} classes, {len(parts["train"])} images to train and {len(parts["val"])} to validate on' in said
    assert int(read_rows(out / 'summary.csv')[0]['images']) == len(parts['val'])


def test_fine_tuning_starts_from_shipped_weights(tmp_path):
    folder, out = digit_folder(tmp_path / 'mine', train=10) / 'train', tmp_path / 'out'
    keys = 'epochs=1', 'warmup_epochs=0', 'workers=0', 'global_batch=16', 'batch_size=16'
    run(folder, '--fine-tune', 'nprf_deit_tiny.fashion_mnist', '--output', out, '--set', *keys)
    config = load_config(out / 'config.yaml')
    assert config.model == 'nprf_deit_tiny.fashion_mnist' and config.pretrained and config.num_classes == CLASSES
    weights, start = read_checkpoint(out / 'last.pt')['state_dict'], timm.create_model(config.model, pretrained=True)
    assert weights['head.weight'].shape == (CLASSES, 128)
    name = 'blocks.0.mlp.fc1.weight'
    moved = (weights[name] - start.state_dict()[name]).norm() / start.state_dict()[name].norm()
    assert 0 < moved < 0.1  # a random start would be farther away than its own length


def test_where_fine_tuning_starts(tmp_path):
    (tmp_path / 'x.pt').touch()
    assert fine_tune_keys(str(tmp_path / 'x.pt'))[0] == f'initial_checkpoint={tmp_path / "x.pt"}'
    with pytest.raises(SystemExit, match='neither a file nor a model with weights, such as nprf_deit_tiny.digits'):
        fine_tune_keys('nprf_deit_tiny')


def test_the_demo_writes_digits_once(tmp_path):
    write_digits(tmp_path / 'digits', 3)
    assert {name: len(images) for name, images in find_images(tmp_path / 'digits').items()} == dict.fromkeys(
        '0123456789', 3
    )
    with pytest.raises(SystemExit, match='is there already'):
        write_digits(tmp_path / 'digits', 3)


@pytest.mark.parametrize('kind', ['missing', 'empty', 'one image', 'split'])
def test_a_folder_that_will_not_do_is_told_in_one_line(kind, tmp_path):
    folder = tmp_path / 'mine'
    if kind != 'missing':
        folder.mkdir()
    if kind == 'one image':
        for name in ('a', 'b'):
            (folder / name).mkdir()
            Image.new('RGB', (8, 8)).save(folder / name / 'x.png')
    if kind == 'split':
        (folder / 'train').mkdir()
    with pytest.raises(SystemExit, match=f'^error: {folder} .*$'):
        find_images(folder)


def test_photographs_have_the_layout_and_the_oddities_of_imagenet(tmp_path):
    root = photograph_folder(tmp_path, classes=12, train=4, val=2)
    for split, count in (('train', 48), ('val', 24)):
        files = sorted((root / split).glob('n????????/*.JPEG'))
        assert len(files) == count and len({path.parent.name for path in files}) == 12
    kinds = {(image.format, image.mode) for image in map(Image.open, root.rglob('*.JPEG'))}
    assert kinds >= {('JPEG', 'RGB'), ('JPEG', 'L'), ('JPEG', 'CMYK'), ('PNG', 'RGB')}
