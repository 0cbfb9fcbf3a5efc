"""Interleaved timing and peak memory, shared by the benchmarks."""

import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NO_FIT = 'does not fit'


def interleave(
    contenders: dict[str, Callable], rounds: int, progress=None, warm_up: bool = True
) -> dict[str, list[float]]:
    """Seconds per call of each contender, one call each per round, after one warm-up call each if asked for.

    Neighbours on a shared machine slow all contenders of a round alike: ratios within rounds are steadier than times.
    """
    seconds = {name: [] for name in contenders}
    for r in range(-int(warm_up), rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if r >= 0:
                seconds[name].append(time.perf_counter() - start)
            if progress is not None:
                progress.update()
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of name's time in units of base's."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base]))


def peak_memory(run: Callable) -> float:
    """Megabytes of resident memory that one call needs beyond what was there before it (Linux only)."""
    run()  # libraries and thread pools come to stay
    gc.collect()
    ctypes.CDLL('libc.so.6').malloc_trim(0)
    Path('/proc/self/clear_refs').write_text('5')  # resets the high-water mark
    before = resident()
    run()
    return max(0.0, resident(peak=True) - before)


def resident(peak: bool = False) -> float:
    """Megabytes of resident memory of this process, now or at its high-water mark (Linux only)."""
    key = 'VmHWM:' if peak else 'VmRSS:'
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def in_child(module: str, *arguments: str) -> Any:
    """What a benchmark prints as JSON in a process that does nothing else; NO_FIT where its memory does not suffice."""
    run = subprocess.run([sys.executable, '-m', module, *arguments], capture_output=True, text=True)
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1])
    if 'allocate memory' in run.stderr or 'MemoryError' in run.stderr:
        return NO_FIT
    raise RuntimeError(f'{module} {" ".join(arguments)} failed:\n{run.stderr}')


@contextmanager
def memory_limit(gigabytes: float) -> Iterator[None]:
    """Makes allocations beyond the limit fail here, before the system kills another process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def memory_and_time(
    contenders: dict[str, Callable | str], rounds: int, progress
) -> tuple[dict[str, float | str], dict[str, list[float]]]:
    """Peak memory of each contender, which also warms it up, then interleaved times of those that fit.

    A contender may be the reason why there is none; it takes the place of its memory, as NO_FIT does for one that
    exceeds the limit. Needs rounds + 1 steps of progress for each.
    """
    peaks = {}
    for name, run in contenders.items():
        peaks[name] = run if isinstance(run, str) else _peak_or_no_fit(run)
        progress.update()
    fitting = {name: run for name, run in contenders.items() if not isinstance(peaks[name], str)}
    progress.update((len(contenders) - len(fitting)) * rounds)
    return peaks, interleave(fitting, rounds, progress, warm_up=False)


def _peak_or_no_fit(run):
    try:
        return peak_memory(run)
    except MemoryError:
        return NO_FIT
    except RuntimeError as error:
        if 'allocate memory' not in str(error):
            raise
        return NO_FIT
