"""Results to wherever the user points: a file, replaced as a whole; a device, pipe or open stream, written into."""

import contextlib
import fcntl
import os
import stat
import sys
from pathlib import Path

from nprf_vit.errors import InputError

from .atomic_file import write_text


class ResultFile:
    """Opened before the work, so that a mistake is told before it rather than after it.

    Args:
        path: What the user gave.
        option: The option it was given by.
    """

    def __init__(self, path: str, option: str) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        try:
            self._open(option)
        except OSError as error:
            raise InputError(f'{option} {path}: {error.strerror}') from None

    def _open(self, option: str) -> None:
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise InputError(f'{option} {self.path}: expected a file in a folder that exists')
        if self.path.exists():
            there = os.stat(self.path)
            # /dev/stdout may lead to a file: a second opening would have a position of its own and be written over
            self._descriptor = _open_already(there)
            if self._descriptor is None and not stat.S_ISREG(there.st_mode):
                self._descriptor = self._open_special(there, option)
        self.path = Path(os.path.realpath(self.path)) if self._descriptor is None else self.path  # a link stays a link
        if self._descriptor is None and not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise InputError(f'{option} {self.path}: no permission to write into the folder')

    def _open_special(self, there: os.stat_result, option: str) -> int:
        if not (stat.S_ISCHR(there.st_mode) or stat.S_ISFIFO(there.st_mode)):
            raise InputError(f'{option} {self.path}: neither a file nor a pipe nor a character device')
        if stat.S_ISFIFO(there.st_mode):
            try:  # without waiting for a reader who may never come
                descriptor = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                raise InputError(f'{option} {self.path}: a pipe that nobody reads') from None
            os.set_blocking(descriptor, True)
            return descriptor
        return os.open(self.path, os.O_WRONLY | os.O_NOCTTY)

    def write(self, text: str) -> None:
        """Once; OSError if it is not taken."""
        if self._descriptor is None:
            write_text(self.path, text)
            return
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # it may be the same, and then the order counts
        data = text.encode()
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        finally:
            os.close(self._descriptor)  # the reader of a pipe waits for it


def _open_already(there: os.stat_result) -> int | None:
    """A copy of the descriptor, if any, by which this process has the file open for writing."""
    try:
        numbers = sorted(int(name) for name in os.listdir('/dev/fd'))
    except OSError:
        numbers = [1, 2]
    for number in numbers:
        with contextlib.suppress(OSError):
            writable = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            if writable and os.path.samestat(os.fstat(number), there):
                return os.dup(number)
    return None
