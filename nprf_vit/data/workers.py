"""Loader workers that leave with their parent, not before it and not after."""

import atexit
import ctypes
import functools
import multiprocessing
import os
import signal
from typing import Any

import torch

from ..processes import die_with_parent

_leaving = multiprocessing.RawValue(ctypes.c_bool, False)


@atexit.register  # runs ahead of multiprocessing's own, which ends the workers by SIGTERM and waits for them
def _leave() -> None:
    _leaving.value = True


def _setup(leaving: Any, worker: int) -> None:
    torch.set_num_threads(1)  # the workers share the cores; transforms are one image at a time
    _ignore_requests(leaving)
    _follow_parent()


setup_worker = functools.partial(_setup, _leaving)  # runs first in every worker


def _ignore_requests(leaving: Any) -> None:
    """Schedulers signal all processes of a job, but when to leave is the parent's business, once its step is done."""

    def on_terminate(number: int, frame: Any) -> None:
        if leaving.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _follow_parent() -> None:
    """torch's workers look for their parent every few seconds, unless stuck in a read; the kernel sees to it."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before the request was made
        os._exit(1)
