"""Arrays of plain numbers from .npz files; what their headers claim is checked before anything is allocated."""

import ast
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from nprf_vit.errors import InputError, first_line

from .plain_arrays import Layout, build_array, check_layout

MAX_HEADER = 4096  # characters; numpy writes 118 for most arrays
# Deflate can make 1000 bytes of one. Photographs shrink to half, scans of digits to a tenth.
MAX_RATIO, ALWAYS = 100, 2**26
_CHUNK = 2**20
_MAGIC = b'\x93NUMPY'
_DAMAGE: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    AttributeError,
    TypeError,
    IndexError,
    struct.error,
    zlib.error,
)
_DAMAGE += (zipfile.BadZipFile, NotImplementedError, RuntimeError, OverflowError, SyntaxError, MemoryError)


def read_npz(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The named arrays of an npz file, where it has them; arrays of anything but plain numbers are refused."""
    try:
        with open(path, 'rb') as stream:
            if stream.read(len(_MAGIC)) == _MAGIC:
                raise ValueError('it is a single array (.npy); np.savez writes several, by name')
            with zipfile.ZipFile(stream) as archive:
                known = set(archive.namelist())
                size = path.stat().st_size
                return {name: _read(archive, f'{name}.npy', size) for name in names if f'{name}.npy' in known}
    except _DAMAGE as error:
        raise InputError(f'cannot read {path} as npz: {first_line(error)[:200]}') from None


def _read(archive: zipfile.ZipFile, name: str, file_size: int) -> np.ndarray:
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f'{name} is compressed by a method that numpy does not use')
    with archive.open(info) as stream:
        layout = _read_header(stream)
        if layout.size > max(ALWAYS, MAX_RATIO * file_size):
            raise ValueError(f'{name} claims {layout.size} bytes in a file of {file_size}')
        data = np.empty(layout.size, np.uint8)
        done = 0
        while done < layout.size:
            chunk = stream.read(min(_CHUNK, layout.size - done))
            if not chunk:
                raise ValueError(f'{name} is cut off')
            data[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
            done += len(chunk)
        if stream.read(1):  # at the end the checksum is compared as well
            raise ValueError(f'{name} has more bytes than its header says')
    return build_array(layout, data)


def _read_header(stream: IO[bytes]) -> Layout:
    """As numpy.lib.format has it, which would read a header of 4 GB and build any type of numpy."""
    start = stream.read(8)
    if start[:6] != _MAGIC or len(start) < 8 or start[6] not in (1, 2, 3):
        raise ValueError('no .npy array')
    width = 2 if start[6] == 1 else 4
    (length,) = struct.unpack('<H' if width == 2 else '<I', stream.read(width))
    if length > MAX_HEADER:
        raise ValueError(f'a header of {length} bytes')
    header = ast.literal_eval(stream.read(length).decode('latin1'))
    if type(header) is not dict or header.keys() != {'descr', 'fortran_order', 'shape'}:
        raise ValueError('a header without descr, fortran_order and shape')
    descr = header['descr']
    if type(descr) is not str or len(descr) < 2:
        raise ValueError('an array of a nested type, and only plain numbers are read')
    order, kind = (descr[0], descr[1:]) if descr[0] in '<>=|' else ('=', descr)
    return check_layout(kind, order, header['shape'], header['fortran_order'])
