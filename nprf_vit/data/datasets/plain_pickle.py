"""Pickles of other people's data, read without running anything: plain containers and numpy arrays, or an error.

Python's own unpickler allocates what a file claims (a 9-byte file can ask for gigabytes) and calls what it names. This
one knows the opcodes that data needs; the few functions in real files (numpy's for arrays) are recognised by name and
never called.
"""

import os
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from nprf_vit.errors import InputError, first_line

from .plain_arrays import brief, build_array, check_layout

MAX_OPCODES = 2**22  # 1.3 million labels need two or three each; a list costs 88 bytes, and its opcode one
_FUNCTIONS = {
    ('numpy', 'ndarray'): 'ndarray',
    ('numpy', 'dtype'): 'dtype',
    ('_codecs', 'encode'): 'encode',  # bytes, by protocols that Python 2 can read
    ('__builtin__', 'bytes'): 'bytes',  # none of them
}
for _package in ('numpy.core', 'numpy._core'):  # renamed in numpy 2
    _FUNCTIONS[f'{_package}.multiarray', '_reconstruct'] = 'reconstruct'
    _FUNCTIONS[f'{_package}.numeric', '_frombuffer'] = 'from_buffer'  # contiguous arrays in protocol 5
# a damaged file may raise almost any of these, depending on the byte that is wrong
_DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, struct.error)
_LATIN = ('latin1', 'latin-1')
_MARK = object()


class _Function:
    """A function that the file names, of those in real files."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Dtype:
    """A type of numbers; its byte order comes after it."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.order = kind, '|'


class _Unfinished:
    """An array whose content comes after it."""

    def __init__(self) -> None:
        self.keys: list[int] = []  # where the memo has it


class _Reader:
    """A stream whose reads allocate no more than the file has left."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.left = stream, os.fstat(stream.fileno()).st_size

    def read(self, count: int) -> bytes:
        data = self.stream.read(min(count, self.left))
        self.left -= len(data)
        return data

    def readline(self) -> bytes:
        data = self.stream.readline(self.left)
        self.left -= len(data)
        return data


class _Machine:
    """Pickle's stack and memo. Every object costs at least an opcode, and every byte of an array a byte of the file."""

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.copies = size  # bytes that may be made by encoding: the same text could be encoded again and again

    def run(self, reader: _Reader) -> Any:
        for count, (opcode, value, _) in enumerate(pickletools.genops(cast(IO[bytes], reader))):
            if count > MAX_OPCODES:
                raise ValueError(f'more than {MAX_OPCODES} opcodes, which no data file needs')
            if opcode.name == 'STOP':
                return self.stack.pop()
            if opcode.name in _VALUES:
                self.stack.append(value)
            elif opcode.name in _STEPS:
                _STEPS[opcode.name](self, value)
            else:
                raise ValueError(f'opcode {opcode.name}, and only plain containers and numpy arrays are read')
        raise EOFError('cut off')

    def since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError('no mark')
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def take(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError('the stack is empty')
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def put(self, key: int) -> None:
        value = self.stack[-1]
        self.memo[key] = value
        if type(value) is _Unfinished:
            value.keys.append(key)

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError('values for something that is no list')
        target.extend(values)

    def update(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError('pairs for something that is no dict')
        for key, value in zip(values[::2], values[1::2]):
            if type(key) not in (str, bytes):  # nested tuples overflow the C stack when hashed, integers can collide
                raise ValueError(f'a key of type {type(key).__name__}')
            target[key] = value

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError(f'it asks for something named {brief(module)}, {brief(name)}')
        if (module, name) not in _FUNCTIONS:
            wanted = f'{module}.{name}'[:80]
            raise ValueError(f'it asks for {wanted}, and only plain containers and numpy arrays are read')
        self.stack.append(_Function(_FUNCTIONS[module, name]))

    def reduce(self) -> None:
        function, args = self.take(2)
        if type(function) is not _Function or type(args) is not tuple:
            raise ValueError('a call of something that is no function')
        if function.name == 'dtype':
            self.stack.append(_Dtype(args[0]))
        elif function.name == 'encode':
            self.stack.append(self.encode(*args))
        elif function.name == 'bytes' and not args:
            self.stack.append(b'')
        elif function.name == 'reconstruct':  # of an empty array: the arguments say nothing
            self.stack.append(_Unfinished())
        elif function.name == 'from_buffer':
            data, dtype, shape, order = args
            self.stack.append(self.array(shape, dtype, order == 'F', data))
        else:
            raise ValueError(f'a call of {function.name}')

    def build(self) -> None:
        """The state of a dtype or of an array, as numpy writes them."""
        target, state = self.take(2)
        if type(target) is _Dtype and type(state) is tuple and state[2:5] == (None, None, None):
            target.order = state[1]  # neither fields nor a shape of its own
            self.stack.append(target)
        elif type(target) is _Unfinished and type(state) is tuple and len(state) == 5:
            _, shape, dtype, fortran, data = state
            array = self.array(shape, dtype, fortran, data)
            for key in target.keys:
                if self.memo[key] is target:
                    self.memo[key] = array
            self.stack.append(array)
        else:
            raise ValueError('a state that is not that of an array of plain numbers')

    def array(self, shape: Any, dtype: Any, fortran: Any, data: Any) -> np.ndarray:
        if type(dtype) is not _Dtype:
            raise ValueError('an array without a type')
        layout = check_layout(dtype.kind, dtype.order, shape, fortran)
        if type(data) is str:  # bytes of Python 2
            data = self.encode(data)
        if type(data) not in (bytes, bytearray):
            raise ValueError(f'an array from a {type(data).__name__}')
        return build_array(layout, data)

    def encode(self, text: str, encoding: str = 'latin1') -> bytes:
        if type(text) is not str or type(encoding) is not str or encoding not in _LATIN:
            raise ValueError(f'bytes in the codec {brief(encoding)}')
        self.copies -= len(text)
        if self.copies < 0:
            raise ValueError('more bytes than the file has')
        return text.encode('latin1')


_VALUES = {'INT', 'BININT', 'BININT1', 'BININT2', 'LONG', 'LONG1', 'LONG4', 'FLOAT', 'BINFLOAT'}
_VALUES |= {'STRING', 'BINSTRING', 'SHORT_BINSTRING', 'UNICODE', 'BINUNICODE', 'SHORT_BINUNICODE', 'BINUNICODE8'}
_VALUES |= {'BINBYTES', 'SHORT_BINBYTES', 'BINBYTES8', 'BYTEARRAY8'}


def _new_dict(machine: _Machine, value: Any) -> None:
    pairs = machine.since_mark()
    machine.stack.append({})
    machine.update(pairs)


_STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    'PROTO': lambda m, v: None,
    'FRAME': lambda m, v: None,
    'MARK': lambda m, v: m.stack.append(_MARK),
    'POP': lambda m, v: m.take(1),
    'POP_MARK': lambda m, v: m.since_mark(),
    'NONE': lambda m, v: m.stack.append(None),
    'NEWTRUE': lambda m, v: m.stack.append(True),
    'NEWFALSE': lambda m, v: m.stack.append(False),
    'EMPTY_LIST': lambda m, v: m.stack.append([]),
    'EMPTY_DICT': lambda m, v: m.stack.append({}),
    'EMPTY_TUPLE': lambda m, v: m.stack.append(()),
    'TUPLE1': lambda m, v: m.stack.append(tuple(m.take(1))),
    'TUPLE2': lambda m, v: m.stack.append(tuple(m.take(2))),
    'TUPLE3': lambda m, v: m.stack.append(tuple(m.take(3))),
    'TUPLE': lambda m, v: m.stack.append(tuple(m.since_mark())),
    'LIST': lambda m, v: m.stack.append(m.since_mark()),
    'DICT': _new_dict,
    'APPEND': lambda m, v: m.extend(m.take(1)),
    'APPENDS': lambda m, v: m.extend(m.since_mark()),
    'SETITEM': lambda m, v: m.update(m.take(2)),
    'SETITEMS': lambda m, v: m.update(m.since_mark()),
    'PUT': lambda m, v: m.put(v),
    'BINPUT': lambda m, v: m.put(v),
    'LONG_BINPUT': lambda m, v: m.put(v),
    'MEMOIZE': lambda m, v: m.put(len(m.memo)),
    'GET': lambda m, v: m.stack.append(m.memo[v]),
    'BINGET': lambda m, v: m.stack.append(m.memo[v]),
    'LONG_BINGET': lambda m, v: m.stack.append(m.memo[v]),
    'GLOBAL': lambda m, v: m.name(*v.split(' ', 1)),
    'STACK_GLOBAL': lambda m, v: m.name(*m.take(2)),
    'REDUCE': lambda m, v: m.reduce(),
    'BUILD': lambda m, v: m.build(),
}


def read_pickle(path: Path) -> Any:
    """The content of a pickle of plain data; text of Python 2 becomes str."""
    try:
        with open(path, 'rb') as stream:
            reader = _Reader(stream)
            return _Machine(reader.left).run(reader)
    except _DAMAGE as error:
        raise InputError(f'cannot read {path} as a pickle: {first_line(error)}') from None
    except (MemoryError, OverflowError, OSError) as error:
        raise InputError(f'cannot read {path} as a pickle: {type(error).__name__}') from None
