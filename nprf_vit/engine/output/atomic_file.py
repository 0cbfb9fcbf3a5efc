"""Files that are either complete or absent, whatever happens while they are written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_SUFFIX = '.tmp'


def replace_file(path: Path, write: Callable[[BinaryIO], object], before: Callable[[], None] | None = None) -> None:
    """Write beside the target, flush to the disk, then rename: a reader sees the old file or the new one, whole.

    Args:
        write: Puts the content into a stream.
        before: Called when the new content is safe on the disk and the old file still in its place.
    """
    temporary = path.with_name(f'.{path.name}.{os.getpid()}{_SUFFIX}')
    try:
        with open(temporary, 'wb') as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        if before is not None:
            before()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    replace_file(path, lambda stream: stream.write(text.encode()))


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process was writing; only for the one process that writes to the folder."""
    for path in folder.glob(f'.*{_SUFFIX}'):
        path.unlink(missing_ok=True)
