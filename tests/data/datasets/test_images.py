"""Where images come from, and the usual mistakes with folders."""

import gzip
import shutil
import struct
import tarfile

import numpy as np
import pytest
from timm.data.dataset import IterableImageDataset
from timm.data.readers.reader_image_folder import find_images_and_targets

from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.datasets.digits import Digits
from nprf_vit.data.datasets.folder import check_same_classes
from nprf_vit.data.datasets.images import open_source
from nprf_vit.data.loaders import StreamLoader
from nprf_vit.data.transforms import eval_transform
from nprf_vit.errors import BadImage, InputError
from tests.data.folders import CLASSES, digit_folder


def open_split(root, split='train', **keys):
    return open_source(make_config({'model': 'm', 'data_dir': str(root), **keys}), split)


@pytest.mark.parametrize('val_name', ['val', 'validation'])
def test_folder(tmp_path, val_name):
    root = digit_folder(tmp_path, val_name=val_name)
    train, val = open_split(root, num_classes=CLASSES), open_split(root, 'validation')
    assert (len(train), len(val), train.num_classes) == (24 * CLASSES, 7 * CLASSES, CLASSES)
    image, target = val[8]
    assert image.mode == 'RGB' and image.size == (8, 8) and target == 1
    assert val.filename(8).endswith(f'{val_name}/digit1/001.png')
    check_same_classes(train.dataset, val.dataset)


def test_tar(tmp_path):
    root = digit_folder(tmp_path / 'images')
    for split in ('train', 'val'):
        with tarfile.open(tmp_path / f'{split}.tar', 'w') as tar:
            for path in sorted((root / split).rglob('*.png')):
                tar.add(path, arcname=str(path.relative_to(root / split)))
    train, val = open_split(tmp_path), open_split(tmp_path, 'validation')
    assert (len(train), len(val)) == (24 * CLASSES, 7 * CLASSES)
    assert sorted({val[i][1] for i in range(len(val))}) == list(range(CLASSES))


def test_missing_folder(tmp_path):
    with pytest.raises(InputError, match='needs a data folder: give --data-dir'):
        open_split('')
    with pytest.raises(InputError, match='none does not exist'):
        open_split(tmp_path / 'none')
    (tmp_path / 'pictures').mkdir()
    with pytest.raises(InputError, match='no folder train or training for the split train.*found pictures'):
        open_split(tmp_path)


def test_zero_images(tmp_path):
    (tmp_path / 'train' / 'cat').mkdir(parents=True)
    with pytest.raises(InputError, match='holds no images'):
        open_split(tmp_path)


def test_flat_validation_folder(tmp_path):
    root = digit_folder(tmp_path)
    for path in (root / 'val').rglob('*.png'):
        path.rename(root / 'val' / f'{path.parent.name}_{path.name}')
    with pytest.raises(InputError, match='val is flat: 28 images lie directly in it'):
        open_split(root, 'validation')


def test_empty_class(tmp_path):
    root = digit_folder(tmp_path)
    (root / 'train' / 'digit9').mkdir()
    with pytest.raises(InputError, match='1 class folders in .*train hold no images, the first: digit9'):
        open_split(root)


def test_classes_that_differ(tmp_path):
    root = digit_folder(tmp_path)
    (root / 'val' / 'digit2').rename(root / 'val' / 'other')
    train, val = open_split(root), open_split(root, 'validation')
    with pytest.raises(InputError, match='only in training: digit2; only in validation: other'):
        check_same_classes(train.dataset, val.dataset)
    with pytest.raises(InputError, match=f'has {CLASSES} classes, the configuration num_classes 1000'):
        open_split(root, num_classes=1000)


def test_the_listing_is_that_of_timm(tmp_path):
    root = digit_folder(tmp_path)
    outside = digit_folder(tmp_path / 'outside')
    (root / 'train' / 'linked').symlink_to(outside / 'train' / 'digit1', target_is_directory=True)
    (root / 'train' / 'digit2' / 'deeper').mkdir()
    (root / 'train' / 'digit2' / 'nowhere.jpg').symlink_to('nothing')
    (root / 'train' / 'digit2' / 'itself.png').symlink_to('itself.png')
    for i, name in enumerate(('10.PNG', '9.jpeg', 'x.txt', '010.png')):
        (root / 'train' / 'digit2' / 'deeper' / name).write_bytes(bytes([i]))
    samples, classes = find_images_and_targets(str(root / 'train'))
    reader = open_split(root).dataset.reader
    assert reader.samples == samples and reader.class_to_idx == classes


def test_links_that_never_end(tmp_path):
    root = digit_folder(tmp_path / 'a')
    for name in 'ab':
        (root / 'train' / 'digit0' / name).symlink_to('.', target_is_directory=True)
    with pytest.raises(InputError, match='digit0/[ab] is a link to a folder that it lies in'):
        open_split(root)
    root = digit_folder(tmp_path / 'b')
    folders = [tmp_path / f'level{i}' for i in range(30)]
    for folder, below in zip(folders, folders[1:]):
        folder.mkdir()
        for name in 'ab':
            (folder / name).symlink_to(below, target_is_directory=True)
    folders[-1].mkdir()
    (root / 'train' / 'digit0' / 'links').symlink_to(folders[0], target_is_directory=True)
    with pytest.raises(InputError, match='folders nested by links'):
        open_split(root)


def test_names_without_an_order(tmp_path):
    root = digit_folder(tmp_path)
    (root / 'train' / 'digit0' / '1²3.png').write_bytes(b'')
    with pytest.raises(InputError, match='cannot order the names in'):
        open_split(root)


def test_expected_counts(tmp_path):
    root = digit_folder(tmp_path)
    with pytest.raises(InputError, match='has 96 images, the configuration expects train_images 100'):
        open_split(root, train_images=100)


def test_unreadable_image_is_named_and_not_replaced(tmp_path):
    root = digit_folder(tmp_path)
    broken = root / 'val' / 'digit1' / '003.png'
    broken.write_bytes(broken.read_bytes()[:40])
    val = open_split(root, 'validation')
    with pytest.raises(BadImage, match='cannot read image 10 of .*digit1/003.png: '):
        val[10]


def test_unknown_dataset(tmp_path):
    with pytest.raises(InputError, match='cannot open dataset torch/nothing'):
        open_split(tmp_path, dataset='torch/nothing')
    with pytest.raises(InputError, match='cannot open dataset wds/x'):
        open_split(tmp_path, dataset='wds/x')


def write_idx(path, array):
    header = struct.pack('>HBB', 0, 8, array.ndim) + struct.pack(f'>{array.ndim}I', *array.shape)
    with gzip.open(path, 'wb') as stream:
        stream.write(header + array.astype(np.uint8).tobytes())
    with gzip.open(path) as packed, open(path.with_suffix(''), 'wb') as plain:
        shutil.copyfileobj(packed, plain)


def test_torchvision_dataset_by_timm_name(tmp_path):
    """The IDX files of torch/fashion_mnist, here filled with digit scans."""
    raw = tmp_path / 'FashionMNIST' / 'raw'
    raw.mkdir(parents=True)
    for split, name in (('train', 'train'), ('validation', 't10k')):
        digits = Digits(split)
        images = np.kron(digits.levels, np.ones((3, 3)))[:, :24, :24] * 15
        write_idx(raw / f'{name}-images-idx3-ubyte.gz', images)
        write_idx(raw / f'{name}-labels-idx1-ubyte.gz', digits.targets)
    val = open_split(tmp_path, 'validation', dataset='torch/fashion_mnist', in_chans=1, num_classes=10)
    assert len(val) == 360 and val.num_classes == 10
    assert val[0][0].mode == 'L' and val[0][0].size == (24, 24)


class Stream:
    """A reader in timm's sense that yields in order only."""

    def __init__(self):
        self.digits, self.epoch = Digits('validation'), 0

    def __iter__(self):
        return (self.digits[(i + self.epoch) % len(self.digits)] for i in range(len(self.digits)))

    def __len__(self):
        return len(self.digits)

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize('workers', [0, 1])
def test_stream_repeats_an_epoch_exactly_and_fills_every_batch(workers):
    config = make_config({'model': 'm', 'dataset': 'wds/x', 'workers': workers, 'in_chans': 1})
    transform = eval_transform(config, (1, 8, 8), (0.5,), (0.5,))
    loader = StreamLoader(IterableImageDataset('', reader=Stream()), transform, config, batch=100)

    def take(epoch, count):
        loader.start(epoch)
        batches = loader.full_batches()
        return [next(batches).targets.tolist() for _ in range(count)]

    first = take(0, 5)  # three full batches, then the stream begins again
    assert [len(batch) for batch in first] == [100] * 5 and first[3] == first[0]
    assert take(1, 1) != first[:1]
    assert take(0, 5) == first
