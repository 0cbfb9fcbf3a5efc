"""Loader workers that end with their parent, neither earlier nor later; and a loader that survives a killed worker."""

import atexit
import ctypes
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..errors import Exit, RunError, in_one_line
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
    """Ignore the signals that schedulers send to all processes of a job: the parent ends its workers after the step."""

    def on_terminate(number: int, frame: Any) -> None:
        if leaving.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _follow_parent() -> None:
    """Let the kernel end a worker with its parent: torch's own check does not run while a worker is stuck in a read."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before the request was made
        os._exit(1)


class WorkerLost(RunError):
    """A loader worker was killed from outside; starting again may help."""

    exit_code = Exit.PREEMPTED


class SafeLoader(DataLoader):
    """A DataLoader by index that brings every batch even if a worker is killed; `lost` is true from then on.

    The rest is read in this process: slow, but the ranks can finish their step together, write a checkpoint and
    leave, which is up to whoever looks at `lost`.
    """

    lost = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.workers: list[Any] = []  # those of all passes: they may live on from one to the next

    def __iter__(self) -> Iterator[Any]:
        count = 0
        if not self.lost:
            try:
                for batch in batches_of_workers(super().__iter__, self.workers):
                    count += 1
                    yield batch
                return
            except WorkerLost as error:
                self.lost = True
                print(in_one_line(error), file=sys.stderr, flush=True)
        for keys in itertools.islice(self.batch_sampler, count, None):
            yield self.collate_fn([self.dataset[key] for key in keys])


def batches_of_workers(start: Callable[[], Iterator[Any]], workers: list[Any] | None = None) -> Iterator[Any]:
    """What a DataLoader's iterator brings; WorkerLost, and never in the middle of something else, if a worker dies.

    torch has a signal handler raise the error wherever the main thread is, half-way through an update for example. The
    iterator notices a dead worker by itself, within five seconds.
    """
    workers = [] if workers is None else workers
    try:
        batches = _without_handler(start)
        workers[:] = {id(w): w for w in (*workers, *multiprocessing.active_children())}.values()
        yield from _separately(batches)
    except _Failed as failed:
        error = failed.error
        if str(error).startswith('Caught ') or not _any_dead(workers):  # the worker's own error, or another one
            raise error from None
        raise WorkerLost(_describe(workers)) from error


class _Failed(Exception):
    """An error of the iterator, as opposed to one of whoever takes its batches."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _without_handler(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    before = signal.getsignal(signal.SIGCHLD)
    try:
        return start()
    except (RuntimeError, OSError, EOFError) as error:
        raise _Failed(error) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)


def _separately(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            raise _Failed(error) from error
        yield batch


def _any_dead(workers: list[Any]) -> bool:
    """Whether one has ended; a connection may break a moment before its process is gone."""
    deadline = time.monotonic() + 2
    while not any(worker.exitcode for worker in workers):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


_REASONS = {
    signal.SIGKILL: 'most likely by the kernel for lack of memory: fewer workers need less',
    signal.SIGBUS: 'most likely for lack of shared memory: enlarge /dev/shm, or use fewer workers',
    signal.SIGSEGV: 'a crash, most likely in an image decoder',
}


def _describe(workers: list[Any]) -> str:
    pid, code = next((worker.pid, worker.exitcode) for worker in workers if worker.exitcode)
    if code > 0:
        return f'loader worker {pid} ended with exit code {code}'
    reason = _REASONS.get(-code, 'by another process')
    return f'loader worker {pid} was killed by {signal.Signals(-code).name}, {reason}'
