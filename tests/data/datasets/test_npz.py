"""npz files that are damaged, of another kind, or claim more than they hold."""

import io
import struct
import zipfile

import numpy as np
import pytest

from nprf_vit.data.datasets.npz import MAX_HEADER, read_npz
from nprf_vit.errors import InputError
from tests.data.limits import run_limited


def refusal(path) -> str:
    with pytest.raises(InputError) as caught:
        read_npz(path, ('x',))
    return str(caught.value)


def npy(array, **options) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, **options)
    return stream.getvalue()


def header(text: str, version: int = 1, length: int | None = None) -> bytes:
    size = len(text) if length is None else length
    return b'\x93NUMPY' + bytes([version, 0]) + struct.pack('<H' if version == 1 else '<I', size) + text.encode()


def write(path, content: bytes, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, 'w', method) as archive:
        archive.writestr('x.npy', content)
    return path


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
@pytest.mark.parametrize('kind', ['?', 'u1', '>i4', '<f8', 'f2'])
def test_what_numpy_writes(tmp_path, save, kind):
    array = np.random.default_rng(0).integers(2, size=(3, 4, 5)).astype(kind)
    given = {'x': array, 'fortran': np.asfortranarray(array[0]), 'empty': array[:0], 'scalar': array[0, 0, 0]}
    save(tmp_path / 'a.npz', **given)
    got = read_npz(tmp_path / 'a.npz', (*given, 'absent'))
    assert got.keys() == given.keys()
    for name, value in given.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape and np.array_equal(got[name], value)


def test_other_headers_of_numpy(tmp_path):
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for version in ((1, 0), (2, 0), (3, 0)):
        assert np.array_equal(read_npz(write(tmp_path / 'a.npz', npy(array, version=version)), ('x',))['x'], array)


def good(shape, size):
    return header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}") + bytes(size)


REFUSED = {
    'objects': (npy(np.array([{}], object)), 'nested type|only plain numbers'),
    'fields': (npy(np.zeros(2, 'f4,i4')), 'nested type'),
    'text': (npy(np.array(['a'])), 'only plain numbers'),
    'cut off': (good((4,), 3), 'cut off'),
    'too long': (good((4,), 5), 'more bytes than its header says'),
    'negative': (good((-4,), 4), 'shape'),
    'a shape of text': (good("'abc'", 4), 'shape'),
    'a header of 4 GB': (header('', 2, 2**32 - 1), 'a header of 4294967295 bytes'),
    'a header of nonsense': (header('(' * MAX_HEADER), 'cannot read'),
    'a header of minus signs': (header('-' * MAX_HEADER + '1'), 'cannot read'),
    'no array': (b'hello', 'no .npy array'),
    'a call': (header("__import__('os').system('true')"), 'cannot read'),
}


@pytest.mark.parametrize('kind', REFUSED)
def test_damaged_arrays(tmp_path, kind):
    content, message = REFUSED[kind]
    with pytest.raises(InputError, match=message):
        read_npz(write(tmp_path / 'a.npz', content), ('x',))


def test_damaged_archives(tmp_path):
    path = tmp_path / 'a.npz'
    np.save(tmp_path / 'a.npy', np.arange(3))
    with pytest.raises(InputError, match='a.npy as npz: it is a single array'):
        read_npz(tmp_path / 'a.npy', ('x',))
    content = bytearray(write(path, good((3000,), 3000)).read_bytes())
    content[60:80] = b'\xff' * 20  # within the deflated stream
    path.write_bytes(content)
    with pytest.raises(InputError, match='cannot read .* as npz: '):
        read_npz(path, ('x',))
    write(path, good((3,), 3), zipfile.ZIP_LZMA)
    with pytest.raises(InputError, match='compressed by a method that numpy does not use'):
        read_npz(path, ('x',))
    content = bytearray(write(path, good((3,), 3)).read_bytes())
    for place in (6, content.rindex(b'PK\x01\x02') + 8):
        content[place] |= 1  # encrypted
    path.write_bytes(content)
    with pytest.raises(InputError, match='encrypted'):
        read_npz(path, ('x',))


def test_bombs(tmp_path):
    """3 MB that would become 3 GB; a header of 200 MB that 200 kB hold; a claim of 2^47 bytes."""
    bomb = tmp_path / 'bomb.npz'
    with zipfile.ZipFile(bomb, 'w', zipfile.ZIP_DEFLATED) as archive, archive.open('x.npy', 'w') as stream:
        stream.write(good((3 << 30,), 0))
        for _ in range(8):
            stream.write(bytes(1 << 20))
    paths = [bomb, write(tmp_path / 'claim.npz', good((2**47,), 8))]
    paths.append(write(tmp_path / 'header.npz', header(' ' * (200 << 20), 2)))
    lines = run_limited(lambda: '\n'.join(map(refusal, paths)), megabytes=100).splitlines()
    assert 'claims 3221225472 bytes' in lines[0] and 'claims 140737488355328 bytes' in lines[1]
    assert 'a header of 209715200 bytes' in lines[2]
