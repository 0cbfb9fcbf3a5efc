"""Pickles made to harm: refused in one line, in little memory and time, and without a call of what they name."""

import json
import pickle
import struct

import numpy as np
import pytest

from nprf_vit.data.datasets import plain_pickle
from nprf_vit.data.datasets.plain_pickle import read_pickle
from nprf_vit.errors import InputError
from tests.data.limits import run_limited


def read_all(folder) -> str:
    said = {}
    for path in sorted(folder.iterdir()):
        try:
            said[path.name] = repr(read_pickle(path))
        except InputError as error:
            said[path.name] = str(error)
    return json.dumps(said)


def text(value: str) -> bytes:
    return b'X' + struct.pack('<I', len(value)) + value.encode()


def name(module: str, function: str) -> bytes:
    return f'c{module}\n{function}\n'.encode()


def dtype(kind: str) -> bytes:
    return name('numpy', 'dtype') + b'(' + text(kind) + b'I0\nI1\ntR'


def array(shape: bytes, kind: str, content: bytes) -> bytes:
    """numpy's own way: an empty array and then its state."""
    empty = name('numpy.core.multiarray', '_reconstruct') + b'(' + name('numpy', 'ndarray') + b'(I0\nt' + text('b')
    return empty + b'tR(I1\n' + shape + dtype(kind) + b'I00\n' + content + b'tb'


OPCODES = 2**19
BYTES = b'B' + struct.pack('<I', 8) + b'A' * 8
HOSTILE = {
    'a buffer of addresses': name('numpy', 'ndarray') + b'((I1\nt' + dtype('O8') + BYTES + b'tR.',
    'a state of addresses': array(b'(I1\nt', 'O8', BYTES) + b'.',
    'a state of objects': array(b'(I1\nt', 'O8', b'(I1\nl') + b'.',
    'a type of fields': array(b'(I1\nt', 'V8', BYTES) + b'.',
    'a structure in a name': array(b'(I1\nt', 'O,O', BYTES) + b'.',
    'more elements than bytes': array(b'(I2000000000\nt', 'u1', BYTES) + b'.',
    'more dimensions than any': array(b'(' + b'I1\n' * 2000 + b't', 'u1', b'B' + struct.pack('<I', 1) + b'A') + b'.',
    'negative lengths': array(b'(I-1\nI-8\nt', 'u1', BYTES) + b'.',
    'a memo of gigabytes': b'\x80\x02Nr' + struct.pack('<I', 2**28) + b'.',
    'a text of gigabytes': b'\x80\x04\x8d' + struct.pack('<Q', 2**40) + b'a.',
    'bytes of gigabytes': b'\x80\x04\x8e' + struct.pack('<Q', 2**40) + b'a.',
    'a frame of gigabytes': b'\x80\x04\x95' + struct.pack('<Q', 2**40) + b'N.',
    'a number of gigabytes': b'\x80\x02\x8b' + struct.pack('<I', 2**31 - 1) + b'a.',
    'the same text again and again': b'(' + text('a' * 2**20) + b'p0\n'
    + (name('_codecs', 'encode') + b'(g0\n' + text('latin1') + b'tR') * 2000 + b't.',
    'lists in lists, each twice': b'(lp0\n' + b'0(g0\ng0\nlp0\n' * 60 + b's.',
    'tuples in tuples as a key': b'(d' + b'N' + b'\x85' * 200_000 + b'Ns.',
    'tuples in tuples as a shape': array(b'N' + b'\x85' * 200_000, 'u1', BYTES) + b'.',
    'tuples in tuples as a name': b'\x80\x04N' + b'\x85' * 200_000 + text('x') + b'\x93.',
    'integers that collide': b'(' + b''.join(f'I{i * (2**61 - 1)}\nN'.encode() for i in range(100_000)) + b'd.',
    'digits without end': b'I' + b'9' * 100_000 + b'\n.',
    'lists without end': b']' * (OPCODES + 2) + b'.',
    'an object': b'c__builtin__\nobject\n(tR.',
    'persistent data': b'Pid\n.',
    'an old class': b'(i__main__\nA\n.',
}  # fmt: skip


def test_hostile_pickles_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_pickle, 'MAX_OPCODES', OPCODES)
    for kind, content in HOSTILE.items():
        (tmp_path / kind).write_bytes(content)
    said = json.loads(run_limited(lambda: read_all(tmp_path), megabytes=200))
    for kind in ('a frame of gigabytes', 'a memo of gigabytes'):  # these are not believed, and nothing is allocated
        assert said.pop(kind) == 'None'
    assert len(said) == len(HOSTILE) - 2
    for kind, message in said.items():
        assert message.startswith(f'cannot read {tmp_path / kind} as a pickle: ') and len(message) < 400, message
        assert 'MemoryError' not in message and len(message.splitlines()) == 1


def test_as_python_2_wrote_them(tmp_path):
    """Protocol 2 with bytes as text, as in CIFAR-10 and ImageNet32: numpy.core, plain strings."""
    rows = np.arange(12, dtype=np.uint8).reshape(2, 6) + 200
    content = b'U' + bytes([12]) + rows.tobytes()
    data = array(b'(I2\nI6\nt', 'u1', content)
    state = b'(I3\nU\x01|NNNI-1\nI-1\nI0\ntb'
    data = data.replace(dtype('u1'), dtype('u1') + state)
    path = tmp_path / 'file'
    path.write_bytes(b'\x80\x02}q\x00(U\x04dataq\x01' + data + b'q\x02U\x06labels](K\x01K\x02eu.')
    got = read_pickle(path)
    assert got['labels'] == [1, 2] and got['data'].dtype == np.uint8 and np.array_equal(got['data'], rows)


@pytest.mark.parametrize('protocol', range(6))
@pytest.mark.parametrize('kind', ['?', 'i1', 'u2', '>i4', '<u8', 'f2', '>f8'])
def test_all_plain_types(tmp_path, protocol, kind):
    rng = np.random.default_rng(0)
    grid = rng.integers(2, size=(3, 4)).astype(kind)
    content = {'c': grid, 'fortran': np.asfortranarray(grid), 'empty': grid[:0], 'scalar': grid[0, :1].reshape(())}
    content['again'] = content['c']
    path = tmp_path / 'file'
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    got = read_pickle(path)
    for key, value in content.items():
        assert got[key].dtype == value.dtype and np.array_equal(got[key], value) and got[key].shape == value.shape
    assert got['again'] is got['c']


def test_other_types_are_refused(tmp_path):
    path = tmp_path / 'file'
    for value in (np.array([1j]), np.array(['text']), np.array([b'x']), np.array([None]), np.zeros(2, 'f4,i4')):
        path.write_bytes(pickle.dumps({'data': value}))
        with pytest.raises(InputError, match='only plain numbers are read|not that of an array of plain numbers'):
            read_pickle(path)
    for value in (np.datetime64('2020'), {1, 2}, {1: 2}, complex(1, 2), range(3)):
        path.write_bytes(pickle.dumps({'data': value}))
        with pytest.raises(InputError, match='cannot read .* as a pickle'):
            read_pickle(path)
