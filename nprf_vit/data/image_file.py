"""From an image file of any kind to a PIL image in the wanted mode, or a BadImage that says why not."""

import contextlib
import functools
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from nprf_vit.errors import BadImage, first_line, printable

# Pillow knows 40 more, some by way of another program (EPS starts Ghostscript) or of parsers that nobody tests
_FORMATS = ('JPEG', 'PNG', 'WEBP', 'TIFF', 'GIF', 'BMP', 'JPEG2000', 'AVIF')


@functools.cache
def formats() -> tuple[str, ...]:
    """The kinds of images that are read, as far as this Pillow has them."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@contextlib.contextmanager
def reading(name: Callable[[], str]) -> Iterator[None]:
    """Whatever damaged data raises becomes a BadImage with the image's name, which may take time to find."""
    try:
        yield
    except BadImage as error:
        raise BadImage(printable(f'cannot read {name()}: {error}')) from None
    # decoders raise nearly anything: RuntimeError and NotImplementedError, too, and MemoryError where it claims much
    except Exception as error:
        raise BadImage(printable(f'cannot read {name()}: {type(error).__name__}: {first_line(error)}')) from error


def open_image(stream: Any) -> Image.Image:
    """The image in a file of a known kind, whose pixels are not decoded yet."""
    return Image.open(stream, formats=formats())


def decode(stream: Any, mode: str, max_pixels: int) -> Image.Image:
    """Decode an image file, whose dimensions are looked at first: a few bytes can claim terabytes."""
    with open_image(stream) as image:
        check_pixels(*image.size, max_pixels)
        image.load()
        check_pixels(*image.size, max_pixels)  # some kinds tell their true size late
        return to_mode(image, mode)


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise BadImage(f'{width}x{height} pixels, more than max_pixels {max_pixels}')


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
