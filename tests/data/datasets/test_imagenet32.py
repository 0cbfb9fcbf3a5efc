"""Downsampled ImageNet in both versions, array files and digits, from small files of the real layouts."""

import io
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.datasets.pixels import as_bytes, open_pixels
from nprf_vit.data.datasets.plain_pickle import read_pickle
from nprf_vit.errors import BadImage, InputError

PER_BATCH = 3


def config(dataset='imagenet32_chrabaszcz', data_dir=None, **changes):
    values = {'model': 'nprf_pixel_imagenet32', 'task': 'pixel', 'eval_metric': 'bpd', 'dataset': dataset}
    counts = {'train_images': 10 * PER_BATCH, 'val_images': PER_BATCH} if dataset.startswith('imagenet32') else {}
    return make_config({**values, **counts, 'data_dir': data_dir and str(data_dir), **changes})


def pictures(count, seed=0):
    return np.random.default_rng(seed).integers(256, size=(count, 32, 32, 3), dtype=np.uint8)


def batch(images, labels=None):
    """A batch as the authors publish it: one row per image, all red bytes first, labels from 1."""
    rows = np.stack([np.concatenate([x[..., c].reshape(-1) for c in range(3)]) for x in images])
    return {'data': rows, 'labels': labels or [1 + i % 1000 for i in range(len(images))], 'mean': rows.mean(0)}


def write(path, content, kind):
    if kind == 'npz':
        np.savez(path.with_name(path.name + '.npz'), **content)
    else:
        path.write_bytes(pickle.dumps(content, protocol=int(kind)))


@pytest.fixture(params=['npz', '2', '4', '5'])
def folder(tmp_path, request):
    for i in range(10):
        write(tmp_path / f'train_data_batch_{i + 1}', batch(pictures(PER_BATCH, i)), request.param)
    (tmp_path / 'val').mkdir()
    write(tmp_path / 'val' / 'val_data', batch(pictures(PER_BATCH, 99)), request.param)
    return tmp_path


def test_planar_rows_become_images_in_the_order_of_the_batches(folder):
    train, val = open_pixels(config(data_dir=folder), 'train'), open_pixels(config(data_dir=folder), 'validation')
    assert (len(train), len(val)) == (30, 3)
    expected = np.concatenate([pictures(PER_BATCH, i) for i in range(10)])
    for i in (0, 2, 3, 5, 27, 29):
        image, raster = train[i]
        assert np.array_equal(image, expected[i])
        assert torch.equal(raster, torch.from_numpy(expected[i].reshape(-1)))
    x, y, c = 7, 5, 2
    image, raster = val[1]
    assert raster[(y * 32 + x) * 3 + c] == image[y, x, c] == as_bytes(image)[c, y, x]
    assert as_bytes(image).shape == (3, 32, 32) and as_bytes(image).dtype == torch.uint8


def test_published_counts_are_the_default(tmp_path):
    write(tmp_path / 'val_data', batch(pictures(2)), '4')
    with pytest.raises(InputError, match=r'Chrabaszcz.* has 2 images: expected 50000'):
        open_pixels(config(data_dir=tmp_path, val_images=None), 'validation')


def spoil(folder, kind, **changes):
    write(folder / 'train_data_batch_4', {**batch(pictures(PER_BATCH)), **changes}, kind)


@pytest.mark.parametrize('kind', ['npz', '4'])
@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'data': np.zeros((3, 3000), np.uint8)}, r'batch_4.* is uint8 \(3, 3000\): expected uint8 rows of 3072 bytes'),
        ({'data': np.zeros((3, 3072))}, r'is float64 \(3, 3072\): expected uint8'),
        ({'labels': [0, 1, 2]}, r'labels in .*batch_4.* lie in 0..2: expected 1..1000'),
        ({'labels': [1, 2, 1001]}, r'lie in 1..1001: expected 1..1000'),
        ({'labels': [1, 2]}, r'are integers of shape \(2,\): expected 3 integers'),
        ({'data': np.zeros((2, 3072), np.uint8), 'labels': [1, 1]}, r'has 29 images: expected 30'),
    ],
)
def test_bad_batches(tmp_path, kind, changes, message):
    for i in range(10):
        write(tmp_path / f'train_data_batch_{i + 1}', batch(pictures(PER_BATCH, i)), kind)
    spoil(tmp_path, kind, **changes)
    with pytest.raises(InputError, match=message):
        open_pixels(config(data_dir=tmp_path), 'train')


def test_missing_batch_and_mixed_kinds(tmp_path):
    with pytest.raises(InputError, match='lacks train_data_batch_1, .* as pickles or .npz'):
        open_pixels(config(data_dir=tmp_path), 'train')
    for i in range(9):
        write(tmp_path / f'train_data_batch_{i + 1}', batch(pictures(1)), '4')
    with pytest.raises(InputError, match='lacks train_data_batch_10 of ImageNet32'):
        open_pixels(config(data_dir=tmp_path), 'train')
    write(tmp_path / 'train_data_batch_10', batch(pictures(1)), 'npz')
    with pytest.raises(
        InputError, match=r'mixes pickles \(train_data_batch_1,.* and npz files \(train_data_batch_10\)'
    ):
        open_pixels(config(data_dir=tmp_path), 'train')


class Trap:
    """Runs a function of its choice when unpickled by anyone who lets it."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def test_unpickler_runs_nothing(tmp_path):
    target, path = tmp_path / 'harm', tmp_path / 'val_data'
    for trap in (Trap(open, str(target), 'w'), Trap(eval, '1+1'), Trap(np.save, str(target), 1), Trap(Trap, print)):
        path.write_bytes(pickle.dumps({'data': trap, 'labels': []}))
        with pytest.raises(InputError, match='only plain containers and numpy arrays are read'):
            read_pickle(path)
    assert not target.exists()
    path.write_bytes(pickle.dumps({'data': np.array([Trap(eval, '1')], dtype=object)}))
    with pytest.raises(InputError, match='asks for builtins.eval'):
        read_pickle(path)


@pytest.mark.parametrize('protocol', range(6))
def test_unpickler_reads_plain_data(tmp_path, protocol):
    content = {'a': [1, 2.5, None, True], 'b': ('text', b'\xff\x00'), 'c': np.arange(6).reshape(2, 3), 'd': {'e': 1}}
    path = tmp_path / 'file'
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    got = read_pickle(path)
    assert np.array_equal(got.pop('c'), content.pop('c')) and got == content


@pytest.mark.parametrize('content', [b'', b'hello', pickle.dumps([1, 2])[:-3], b'\x80\x04\x95\xff'])
def test_damaged_files(tmp_path, content):
    (tmp_path / 'val_data').write_bytes(content)
    with pytest.raises(InputError, match='cannot read .*val_data as a pickle'):
        open_pixels(config(data_dir=tmp_path), 'validation')
    (tmp_path / 'val_data').rename(tmp_path / 'val_data.npz')
    with pytest.raises(InputError, match='cannot read .*val_data.npz as npz'):
        open_pixels(config(data_dir=tmp_path), 'validation')


def test_a_pickle_of_something_else(tmp_path):
    (tmp_path / 'val_data').write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(InputError, match='no ImageNet32 batch: expected a dict with data and labels'):
        open_pixels(config(data_dir=tmp_path), 'validation')


def png(image):
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, 'PNG')
    return stream.getvalue()


def write_pngs(root, name, files, as_tar):
    if not as_tar:
        (root / name).mkdir()
        for file, content in files.items():
            (root / name / file).write_bytes(content)
        return
    with tarfile.open(root / f'{name}.tar', 'w') as tar:
        for file, content in sorted(files.items(), reverse=True):  # order in a tar is anybody's
            member = tarfile.TarInfo(f'{name}/{file}')
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize('as_tar', [False, True])
def test_older_version(tmp_path, as_tar):
    images = pictures(30)
    write_pngs(tmp_path, 'train_32x32', {f'{i:07d}.png': png(x) for i, x in enumerate(images)}, as_tar)
    write_pngs(tmp_path, 'valid_32x32', {f'{i:05d}.png': png(x) for i, x in enumerate(images[:3])}, as_tar)
    given = config('imagenet32_vandenoord', tmp_path)
    train, val = open_pixels(given, 'train'), open_pixels(given, 'validation')
    assert (len(train), len(val)) == (30, 3)
    for i in (0, 7, 29):
        assert np.array_equal(train[i][0], images[i])
    assert np.array_equal(val[2][0], images[2])
    with pytest.raises(InputError, match=r'van den Oord.* has 30 images: expected 1281149'):
        open_pixels(config('imagenet32_vandenoord', tmp_path, train_images=None), 'train')


@pytest.mark.parametrize('as_tar', [False, True])
@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (png(np.zeros((32, 31, 3), np.uint8)), r'2\.png.* is 31x32: expected 32x32'),
        (png(np.zeros((32, 32), np.uint8)), r'2\.png.* has 8 bits and colour type 0: expected 8-bit RGB'),
        (b'GIF89a' + bytes(40), r'2\.png.* is no PNG file'),
    ],
)
def test_bad_image_files(tmp_path, as_tar, content, message):
    write_pngs(tmp_path, 'valid_32x32', {'1.png': png(pictures(1)[0]), '2.png': content}, as_tar)
    with pytest.raises(InputError, match=message):
        open_pixels(config('imagenet32_vandenoord', tmp_path), 'validation')


def test_truncated_image_and_bad_tar(tmp_path):
    write_pngs(tmp_path, 'valid_32x32', {'1.png': png(pictures(1)[0])[:60]}, as_tar=False)
    source = open_pixels(config('imagenet32_vandenoord', tmp_path, val_images=1), 'validation')
    with pytest.raises(InputError, match=r'cannot read 1\.png'):
        source[0]
    (tmp_path / 'train_32x32.tar').write_bytes(b'no tar' * 200)
    with pytest.raises(InputError, match='cannot read .*train_32x32.tar as an uncompressed tar'):
        open_pixels(config('imagenet32_vandenoord', tmp_path), 'train')
    with pytest.raises(InputError, match='has neither valid_32x32.tar nor a folder valid_32x32'):
        (tmp_path / 'valid_32x32').rename(tmp_path / 'other')
        open_pixels(config('imagenet32_vandenoord', tmp_path), 'validation')


def test_a_pipe_or_a_folder_among_the_images(tmp_path):
    write_pngs(tmp_path, 'valid_32x32', {'1.png': png(pictures(1)[0])}, as_tar=False)
    given = config('imagenet32_vandenoord', tmp_path, val_images=1)
    os.mkfifo(tmp_path / 'valid_32x32' / '2.png')
    with pytest.raises(InputError, match=r'cannot read .*2\.png: not a regular file'):
        open_pixels(given, 'validation')
    (tmp_path / 'valid_32x32' / '2.png').unlink()
    (tmp_path / 'valid_32x32' / '2.png').mkdir()
    with pytest.raises(InputError, match=r'cannot read .*2\.png: not a regular file'):
        open_pixels(given, 'validation')
    (tmp_path / 'valid_32x32' / '2.png').rmdir()
    source = open_pixels(given, 'validation')
    (tmp_path / 'valid_32x32' / '1.png').unlink()
    with pytest.raises(BadImage, match=r'cannot read 1\.png of .*: FileNotFoundError'):
        source[0]
    os.mkfifo(tmp_path / 'valid_32x32' / '1.png')
    with pytest.raises(BadImage, match=r'cannot read 1\.png of .*: not a regular file'):
        source[0]


def test_a_tar_that_is_cut_off(tmp_path):
    files = {f'{i}.png': png(x) for i, x in enumerate(pictures(3))}
    write_pngs(tmp_path, 'valid_32x32', files, as_tar=True)
    archive = tmp_path / 'valid_32x32.tar'
    content = archive.read_bytes()
    with tarfile.open(archive) as tar:
        ends = [member.offset for member in tar.getmembers()[1:]] + [tar.offset]
    for end in (*ends, *(end - 300 for end in ends), ends[0] + 300, 0):
        archive.write_bytes(content[:end])
        with pytest.raises(InputError, match='cannot read .*valid_32x32.tar as an uncompressed tar: '):
            open_pixels(config('imagenet32_vandenoord', tmp_path, val_images=None), 'validation')


def test_labels_that_are_no_list_of_integers(tmp_path):
    loop = [1]
    for _ in range(60):
        loop = [loop, loop]
    for labels in (loop, [[1], [2], [3]], ['1', '2', '3'], [1, 2, 10**5000], [1.0, 2.0, 3.0], {'a': 1}, None):
        write(tmp_path / 'val_data', {**batch(pictures(3)), 'labels': labels}, '4')
        with pytest.raises(InputError, match='labels in .*val_data'):
            open_pixels(config(data_dir=tmp_path), 'validation')


def test_array_file(tmp_path):
    path = tmp_path / 'images.npz'
    train, test = pictures(4)[:, :8, :6], pictures(2, 1)[:, :8, :6]
    np.savez(path, x_train=train, x_test=test)
    given = config('arrays', path)
    assert np.array_equal(open_pixels(given, 'validation')[1][0], test[1])
    source = open_pixels(given, 'train')
    source.check(3, (8, 6), 256)
    with pytest.raises(InputError, match=r'images of 8x6 with 3 channels, the model takes 32x32 with 1'):
        source.check(1, (32, 32), 256)
    with pytest.raises(InputError, match=r'has bytes up to \d+, the model levels 0..16'):
        source.check(3, (8, 6), 17)
    np.savez(path, x_train=train.astype(np.int64), y=test)
    with pytest.raises(InputError, match=r'x_train in .* is int64 \(4, 8, 6, 3\): expected uint8 images'):
        open_pixels(given, 'train')
    with pytest.raises(InputError, match='x_test in .* is absent'):
        open_pixels(given, 'validation')


def test_digits_are_levels():
    source = open_pixels(config('digits'), 'validation')
    assert len(source) == 360 and source[0][0].shape == (8, 8, 1)
    assert source.images.max() == 16
    source.check(1, (8, 8), 17)


def test_names_and_folders(tmp_path):
    with pytest.raises(InputError, match="no dataset 'imagenet32' for the task pixel: expected one of imagenet32_chr"):
        open_pixels(config('imagenet32'), 'train')
    with pytest.raises(InputError, match='needs a folder, --data-dir DIR'):
        open_pixels(config(), 'train')
    with pytest.raises(InputError, match='nowhere does not exist: dataset arrays needs a file'):
        open_pixels(config('arrays', tmp_path / 'nowhere'), 'train')
