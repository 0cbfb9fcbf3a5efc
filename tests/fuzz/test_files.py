"""Damaged images, pickles, npz files and tars: read, or refused in one line; nothing else gets out.

python -m pytest tests/fuzz/test_files.py --budget 20000
"""

import io
import pickle
import tarfile
import warnings

import numpy as np
import pytest
from PIL import Image

from nprf_vit.data.datasets.npz import read_npz
from nprf_vit.data.datasets.plain_pickle import read_pickle
from nprf_vit.data.datasets.tars import open_tar
from nprf_vit.data.image_file import decode, reading
from nprf_vit.errors import InputError

from .budget import cases

IMAGES = ['JPEG', 'PNG', 'GIF', 'WEBP', 'BMP', 'TIFF', 'JPEG2000', 'AVIF']


def damaged(content: bytes, seed: int) -> bytes:
    """Some bytes changed, a part cut out, repeated or moved, or the end cut off."""
    rng = np.random.default_rng(seed)
    data = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        a, b = sorted(int(x) for x in rng.integers(len(data) + 1, size=2))
        b = min(b, a + int(rng.choice([1, 8, 64, 10_000])))
        kind = rng.integers(6)
        if kind <= 2:
            data[a:b] = rng.integers(256, size=b - a, dtype=np.uint8).tobytes()
        elif kind == 3:
            data[a:b] = b'\xff' * (b - a)
        elif kind == 4:
            data[a:a] = data[a:b]
        else:
            del data[a:b]
    return bytes(data)


def one_line(read, count: int) -> int:
    """Try seeds 0 to count; returns how many were refused."""
    refused = 0
    for seed in range(count):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                read(seed)
        except InputError as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000, f'seed {seed}'
            refused += 1
        except BaseException as error:
            raise AssertionError(f'seed {seed}') from error
    return refused


@pytest.mark.parametrize('kind', IMAGES)
def test_images(kind):
    rng = np.random.default_rng(0)
    stream = io.BytesIO()
    Image.fromarray(rng.integers(256, size=(40, 40, 3), dtype=np.uint8)).save(stream, kind)

    def read(seed):
        with reading(lambda: 'x'):
            decode(io.BytesIO(damaged(stream.getvalue(), seed)), 'RGB', 10_000)

    assert one_line(read, cases(40)) > 0


@pytest.mark.parametrize('protocol', [0, 2, 4, 5])
def test_pickles(tmp_path, protocol):
    rows = np.random.default_rng(0).integers(256, size=(3, 20), dtype=np.uint8)
    content = pickle.dumps({'data': rows, 'labels': [1, 2, 3], 'mean': rows.mean(0), 'x': ('a', b'b')}, protocol)
    path = tmp_path / 'file'

    def read(seed):
        path.write_bytes(damaged(content, seed))
        read_pickle(path)

    assert one_line(read, cases(100)) > 0


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    rng = np.random.default_rng(0)
    path = tmp_path / 'a.npz'
    save(path, x=rng.integers(256, size=(3, 20), dtype=np.uint8), y=rng.standard_normal(9))
    content = path.read_bytes()

    def read(seed):
        path.write_bytes(damaged(content, seed))
        read_npz(path, ('x', 'y'))

    assert one_line(read, cases(100)) > 0


def test_tars(tmp_path):
    path = tmp_path / 'train.tar'
    with tarfile.open(path, 'w') as tar:
        for i in range(8):
            member = tarfile.TarInfo(f'class{i % 2}/{i}.png')
            member.size = 300 * i
            tar.addfile(member, io.BytesIO(bytes([i]) * member.size))
    content = path.read_bytes()

    def read(seed):
        path.write_bytes(damaged(content, seed))
        reader = open_tar(path)
        for index in range(len(reader)):
            with reading(lambda: 'x'):
                reader[index][0].read(100)

    assert one_line(read, cases(100)) > 0
