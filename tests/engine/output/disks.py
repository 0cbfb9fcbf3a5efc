"""Small real disks for tests: a tmpfs of a few megabytes that can be filled to the last byte."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str = '8m') -> Iterator[Path]:
    """A file system of its own in `folder`; without the right to mount one the test is skipped."""
    folder.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        pytest.skip(f'no small disk: {error}')
    if done.returncode:
        pytest.skip(f'no small disk: {done.stderr.strip()}')
    try:
        yield folder
    finally:
        subprocess.run(['umount', '--lazy', str(folder)], check=True, timeout=30)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with open(disk / 'filler', 'ab', buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass


def free(disk: Path) -> None:
    (disk / 'filler').unlink()
