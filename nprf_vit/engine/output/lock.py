"""One writer per output folder."""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from nprf_vit.errors import InputError

_TAKEN = (errno.EAGAIN, errno.EACCES)


class FolderLost(OSError):
    """The locked folder is no longer where it was: what lies there now may be another run's."""


class SoleWriter:
    """While entered, holds the folder's lock, which the kernel releases when the process dies.

    The lock belongs to the folder, not to its name: another folder of that name has another lock. So whoever writes
    by name first asks `check`.

    Args:
        patience: Seconds to wait for it: what is left of a killed run may take a moment to end.
    """

    def __init__(self, folder: Path, patience: float = 15.0) -> None:
        self.folder, self.patience = folder, patience
        self.lost = False
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def __enter__(self) -> 'SoleWriter':
        deadline = time.monotonic() + self.patience
        while not self._take():
            if time.monotonic() > deadline:
                raise InputError(f'another process is writing to the output folder {self.folder}')
            time.sleep(0.2)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # forked loader workers hold a copy of the descriptor
        os.close(self._descriptor)
        self._descriptor = None

    def check(self) -> None:
        """Raise FolderLost if the name leads elsewhere by now. Does nothing without the lock, as on other ranks."""
        if self._descriptor is not None and not self._in_place(self._descriptor):
            self.lost = True
            raise FolderLost('the folder was removed, moved or replaced while this run was writing to it')

    def _take(self) -> bool:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            if _try_lock(descriptor) and self._in_place(descriptor):
                self._descriptor = descriptor
        finally:
            if self._descriptor is None:
                os.close(descriptor)
        return self.held

    def _in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.folder), os.fstat(descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _TAKEN  # a file system without locks on folders: go without
    return True
