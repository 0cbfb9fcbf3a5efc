"""From an image file of any kind to a PIL image in the wanted mode, or a BadImage that says why not."""

import contextlib
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from ..errors import BadImage, first_line

# what PIL's readers are known to raise on damaged files, besides OSError, which most of them do
_DAMAGE = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError, MemoryError)
_DAMAGE += (AttributeError, struct.error, zlib.error, Image.DecompressionBombError)


@contextlib.contextmanager
def reading(name: Callable[[], str]) -> Iterator[None]:
    """Everything that damaged data may raise becomes a BadImage with the image's name, which may take time to find."""
    try:
        yield
    except BadImage as error:
        raise BadImage(f'cannot read {name()}: {error}') from None
    except _DAMAGE as error:
        raise BadImage(f'cannot read {name()}: {type(error).__name__}: {first_line(error)}') from error


def decode(stream: Any, mode: str, max_pixels: int) -> Image.Image:
    """Decode an image file, whose dimensions are looked at first: a few bytes can claim terabytes."""
    with Image.open(stream) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise BadImage(f'{width}x{height} pixels, more than max_pixels {max_pixels}')
        image.load()
        return to_mode(image, mode)


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """Palettes, CMYK and transparency as PIL converts them; 16-bit greys scaled, where PIL would clip them to white."""
    if image.mode.startswith('I;16'):
        grey = np.asarray(image).astype(np.float32) / 257  # 65535 → 255
        image = Image.fromarray(np.rint(grey).astype(np.uint8))
    elif image.mode in ('I', 'F'):
        raise BadImage(f'mode {image.mode} has no fixed range of values')
    return image.convert(mode)


def check_regular(path: str) -> None:
    """Opening a pipe would wait for ever, and a device may never end."""
    kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind):
        raise BadImage('not a regular file')
