"""One writer per output folder."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError

_TAKEN = (errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def sole_writer(folder: Path, patience: float = 15.0) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases when the process dies.

    Args:
        patience: Seconds to wait for it: what is left of a killed run may take a moment to end.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + patience
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise InputError(f'another process is writing to the output folder {folder}')
            time.sleep(0.2)
        yield
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked loader workers hold a copy of the descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _TAKEN  # a file system without locks on folders: go without
    return True
