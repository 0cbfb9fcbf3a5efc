"""Tar files that end where they should: one that was cut off would pass for a smaller data set."""

import contextlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from timm.data.readers.reader_image_in_tar import ReaderImageInTar

from nprf_vit.errors import InputError, first_line

_DAMAGE = (tarfile.TarError, OSError, ValueError, EOFError, OverflowError, RecursionError, MemoryError, AssertionError)


@contextlib.contextmanager
def reading_tar(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(f'cannot read {path} as an uncompressed tar: {first_line(error)}') from None


def check_end(stream: IO[bytes], offset: int) -> None:
    """tarfile takes damage behind the first header for the end; the end itself is a block of zeros."""
    stream.seek(offset)
    block = stream.read(tarfile.BLOCKSIZE)
    if block != bytes(tarfile.BLOCKSIZE):
        what = 'cut off' if len(block) < tarfile.BLOCKSIZE else 'damaged'
        raise tarfile.ReadError(f'{what} at byte {offset}, before the end of the archive')


def open_tar(path: Path) -> ReaderImageInTar:
    """timm's reader of a tar of images, or of tars of images, if all of them are whole."""
    with reading_tar(path):
        try:
            reader = ReaderImageInTar(str(path))
        except ValueError as error:  # timm unpacks the list of samples
            if 'not enough values to unpack' in str(error):
                raise InputError(f'{path} holds no images') from None
            raise
        ends: dict[str | None, int] = {None: 0}  # by child tar: where its last known member ends
        children = {}
        for member, _, child in reader.samples:
            if member.issparse() or (child is not None and child.issparse()):
                raise tarfile.ReadError(f'{member.name[-80:]} has holes, and may claim any size')
            key = None if child is None else child.name
            ends[key] = max(ends.get(key, 0), member.offset_data + member.size)
            if child is not None:
                children[child.name] = child
                ends[None] = max(ends[None], child.offset_data + child.size)
        with tarfile.open(path, 'r:') as tar, open(path, 'rb') as stream:
            _check_rest(stream, ends[None])
            for name, child in children.items():
                inner = tar.extractfile(child)
                assert inner is not None, 'the reader has listed files of it'
                _check_rest(inner, ends[name])
    return reader


def _check_rest(stream: IO[bytes], end: int) -> None:
    """From the member that ends there on: whatever follows the last image, up to the archive's end."""
    start = -(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    stream.seek(start)
    with tarfile.open(fileobj=stream, mode='r:') as rest:
        for _ in rest:
            rest.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
        check_end(stream, rest.offset)
