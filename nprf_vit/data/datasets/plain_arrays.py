"""Arrays of plain numbers from what a file says about them, checked before anything is allocated or built."""

from typing import Any, NamedTuple

import numpy as np

# numpy's constructors take buffers of objects and nested types, so that a file could hand them addresses
_KINDS = {'b1', 'i1', 'i2', 'i4', 'i8', 'u1', 'u2', 'u4', 'u8', 'f2', 'f4', 'f8'}
_ORDERS = {'<', '>', '=', '|'}
_MAX_DIMS = 32


class Layout(NamedTuple):
    """How a file says that its bytes are to be read."""

    kind: str  # of _KINDS
    order: str  # of _ORDERS, as numpy writes it before the kind
    shape: tuple[int, ...]
    fortran: bool

    @property
    def size(self) -> int:
        """In bytes."""
        size = int(self.kind[1:])
        for length in self.shape:
            size *= length
        return size


def brief(value: Any) -> str:
    """A value for a message; containers from a file may be too deep or too large to be printed."""
    return repr(value[:40]) if type(value) is str else type(value).__name__


def check_layout(kind: Any, order: Any, shape: Any, fortran: Any) -> Layout:
    """Raises ValueError for anything but an array of plain numbers."""
    if type(kind) is not str or kind not in _KINDS:
        raise ValueError(f'an array of type {brief(kind)}, and only plain numbers are read')
    if type(order) is not str or order not in _ORDERS:
        raise ValueError(f'an array with byte order {brief(order)}')
    plain = type(shape) is tuple and len(shape) <= _MAX_DIMS and all(type(n) is int and 0 <= n < 2**48 for n in shape)
    if not plain or fortran not in (0, 1):
        raise ValueError('an array whose shape is not a few plain lengths')
    return Layout(kind, order, shape, bool(fortran))


def build_array(layout: Layout, data: Any) -> np.ndarray:
    """A view of bytes, whose number must be the layout's."""
    if layout.size != len(data):
        raise ValueError(f'an array {layout.shape} of {layout.kind} from {len(data)} bytes')
    dtype = np.dtype(layout.order + layout.kind)
    array = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
    return array.reshape(layout.shape, order='F' if layout.fortran else 'C')
