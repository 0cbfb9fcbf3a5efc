"""Images of every kind, sound and damaged: converted, or refused by name; never a hang."""

import contextlib
import io
import os
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.datasets.images import open_source
from nprf_vit.data.image_file import decode, reading
from nprf_vit.errors import BadImage

from .folders import digit_folder

KINDS = ['JPEG', 'PNG', 'GIF', 'WEBP', 'BMP', 'TIFF', 'JPEG2000', 'AVIF']


def file(image, kind='PNG', **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def picture(size=40):
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(256, size=(size, size, 3), dtype=np.uint8))


def read(content, mode='RGB', max_pixels=10_000):
    with reading(lambda: 'x'):
        return decode(io.BytesIO(content), mode, max_pixels)


def test_cmyk_is_converted():
    grey = Image.new('RGB', (16, 16), (90, 90, 90)).convert('CMYK')
    got = read(file(grey, 'JPEG', quality=95))
    assert got.mode == 'RGB' and np.abs(np.asarray(got).astype(int) - 90).max() < 4


def test_palette_is_converted():
    image = Image.new('P', (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    for content in (file(image), file(image, 'GIF'), file(image, transparency=bytes([0, 128]))):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', UserWarning)  # transparency is dropped, which PIL mentions
            assert np.asarray(read(content))[0, 0].tolist() == [10, 200, 30]


def test_sixteen_bits_are_scaled_and_not_clipped():
    levels = np.array([[0, 257, 32768, 65535]], np.uint16)
    for mode in ('RGB', 'L'):
        got = np.asarray(read(file(Image.fromarray(levels)), mode))
        assert got.reshape(4, -1)[:, 0].tolist() == [0, 1, 128, 255]
    with pytest.raises(BadImage, match='mode F has no fixed range'):
        read(file(Image.fromarray(np.ones((2, 2), np.float32)), 'TIFF'))


@pytest.mark.parametrize('mode', ['1', 'L', 'LA', 'RGBA'])
def test_other_modes_are_converted(mode):
    assert read(file(picture().convert(mode))).mode == 'RGB'


@pytest.mark.parametrize('kind', KINDS)
def test_every_cut_is_refused_or_harmless(kind):
    content = file(picture(), kind)
    refused = 0
    for length in range(0, len(content) - 1, max(1, len(content) // 60)):
        try:
            assert read(content[:length]).size == (40, 40)
        except BadImage:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize('kind', KINDS)
def test_every_changed_byte_is_refused_or_decoded(kind):
    """Whatever a reader raises on noise, only BadImage gets out."""
    content, rng = file(picture(), kind), np.random.default_rng(1)
    for _ in range(200):
        noisy = bytearray(content)
        for place in rng.integers(min(len(noisy), 400), size=3):
            noisy[place] = rng.integers(256)
        with contextlib.suppress(BadImage):
            read(bytes(noisy))


def test_a_bomb_is_not_decoded():
    """A PNG header that claims 60000x60000 pixels, 10 GB, over a few bytes of data."""

    def chunk(name, data):
        return struct.pack('>I', len(data)) + name + data + struct.pack('>I', zlib.crc32(name + data))

    for side in (200, 12_000, 60_000):
        header = struct.pack('>IIBBBBB', side, side, 8, 2, 0, 0, 0)
        content = (
            b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(b'')) + chunk(b'IEND', b'')
        )
        with warnings.catch_warnings(), pytest.raises(BadImage, match='max_pixels 10000|DecompressionBomb'):
            warnings.simplefilter('ignore', Image.DecompressionBombWarning)
            read(content)


def test_files_that_are_gone_empty_or_no_files(tmp_path):
    root = digit_folder(tmp_path)
    source = open_source(make_config({'model': 'm', 'data_dir': str(root)}), 'validation')
    names = [source.filename(index) for index in range(4)]
    os.unlink(names[0])
    open(names[1], 'wb').close()
    os.unlink(names[2])
    os.mkfifo(names[2])  # opening it would wait for a writer
    os.unlink(names[3])
    os.symlink('/dev/zero', names[3])
    for index, reason in enumerate(('FileNotFoundError', 'UnidentifiedImageError', 'not a regular', 'not a regular')):
        with pytest.raises(BadImage, match=f'cannot read image {index} of .*: {reason}'):
            source[index]


def test_no_file_starts_another_program(tmp_path, monkeypatch):
    """Pillow reads EPS by way of Ghostscript, and looks at the content, not at the name."""
    marker = tmp_path / 'started'
    (tmp_path / 'gs').write_text(f'#!/bin/sh\ntouch {marker}\n')
    (tmp_path / 'gs').chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path), prepend=':')
    monkeypatch.setattr(EpsImagePlugin, 'gs_binary', None)
    content = file(picture(), 'EPS')
    with contextlib.suppress(OSError), Image.open(io.BytesIO(content)) as image:
        image.load()
    assert marker.exists()  # the trap works
    marker.unlink()
    with pytest.raises(BadImage, match='UnidentifiedImageError'):
        read(content)
    assert not marker.exists()


@pytest.mark.parametrize('kind', sorted({'PPM', 'ICO', 'TGA', 'DDS', 'SGI', 'PCX', 'IM', 'ICNS', 'MSP', 'XBM'}))
def test_rare_kinds_are_not_read(kind):
    image = picture(64).convert('1') if kind in ('MSP', 'XBM') else picture(64)
    with pytest.raises(BadImage, match='UnidentifiedImageError'):
        read(file(image, kind))


@pytest.mark.parametrize('kind', KINDS)
def test_known_kinds_are_read(kind):
    assert read(file(picture(), kind)).size == (40, 40)


@pytest.mark.parametrize('error', [RuntimeError('x'), NotImplementedError(), MemoryError(), AssertionError('a\nb')])
def test_whatever_a_decoder_raises(error):
    with pytest.raises(BadImage, match=f'cannot read x: {type(error).__name__}'), reading(lambda: 'x'):
        raise error


def test_names_of_any_bytes(tmp_path):
    """Not UTF-8, a line break, and colours for the terminal."""
    root = digit_folder(tmp_path)
    for name in (b'\xff\xfe.png', b'a\nerror: b.png', b'\x1b[31mred.png', 'groß.png'.encode()):
        with open(os.path.join(os.fsencode(root / 'val' / 'digit0'), name), 'wb'):
            pass
    source = open_source(make_config({'model': 'm', 'data_dir': str(root)}), 'validation')
    said = []
    for index in range(len(source)):
        try:
            source[index]
        except BadImage as error:
            said.append(str(error))
    assert len(said) == 4
    for text in said:
        assert text.isprintable() and text.encode()
    assert sum('groß.png' in text for text in said) == 1 and sum(r'\udcff\udcfe.png' in text for text in said) == 1
