"""Pickles of other people's data, read without running anything: plain containers and numpy arrays, or an error."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, first_line


def _encode(text: str, encoding: str = 'utf-8') -> bytes:
    """What _codecs.encode does in pickles of bytes by Python 2 protocols, for the one codec they use."""
    if encoding not in ('latin1', 'latin-1'):
        raise pickle.UnpicklingError(f'bytes in the codec {encoding}')
    return text.encode('latin1')


_reconstruct = np.ndarray.__reduce__(np.empty(0))[0]
# protocol 5 rebuilds contiguous arrays by another function
_from_buffer = np.ones(1).__reduce_ex__(5)[0]
_ALLOWED = {('numpy', 'ndarray'): np.ndarray, ('numpy', 'dtype'): np.dtype, ('_codecs', 'encode'): _encode}
for _package in ('numpy.core', 'numpy._core'):  # renamed in numpy 2
    _ALLOWED[f'{_package}.multiarray', '_reconstruct'] = _reconstruct
    _ALLOWED[f'{_package}.numeric', '_frombuffer'] = _from_buffer


class PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, tuples, numbers, text, bytes and numpy arrays; refuses every other class and function."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f'it asks for {module}.{name}, and only plain containers and numpy arrays are read'
            ) from None


def read_pickle(path: Path) -> Any:
    """The content of a pickle of plain data; text of Python 2 becomes str."""
    try:
        with open(path, 'rb') as stream:
            return PlainUnpickler(stream, encoding='latin1').load()
    # a damaged pickle may raise almost any of these, depending on the byte that is wrong
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise InputError(f'cannot read {path} as a pickle: {first_line(error)}') from None
    except (MemoryError, OverflowError, OSError) as error:
        raise InputError(f'cannot read {path} as a pickle: {type(error).__name__}') from None
