"""Interleaved timing, peak memory, and result files, shared by all benchmarks."""

import csv
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).parent.parent / 'docs' / 'results'


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
    before = _status('VmRSS')
    run()
    return max(0.0, _status('VmHWM') - before) / 1024


def write_csv(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _status(key):
    for line in Path('/proc/self/status').read_text().splitlines():
        if line.startswith(key + ':'):
            return int(line.split()[1])
    raise RuntimeError(f'/proc/self/status has no {key}')
