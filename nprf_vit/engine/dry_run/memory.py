"""How much memory this process uses, used at most, and may still take, in bytes; and which errors mean too little."""

import contextlib
import ctypes
import gc
import os
import re
import resource
import sys
from pathlib import Path

import torch

# what torch and the C++ library say on a CPU, where there is no class for it
_WORDS = re.compile(r"can't allocate memory|bad_alloc|out of memory|not enough memory|cannot allocate memory", re.I)
_CGROUPS = (
    ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory.current'),
    ('/sys/fs/cgroup/memory/memory.limit_in_bytes', '/sys/fs/cgroup/memory/memory.usage_in_bytes'),
)


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or the one it came from, tells that memory ran out."""
    if error is None:
        return False
    told = isinstance(error, RuntimeError | OSError | ValueError) and _WORDS.search(str(error))
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(told) or ran_out(error.__cause__)


def is_separate(device: torch.device) -> bool:
    """Whether the device has memory of its own and counts it, as CUDA and XPU do; else that of the process counts."""
    return device.type != 'cpu' and hasattr(torch.get_device_module(device), 'max_memory_allocated')


def release(device: torch.device) -> None:
    """Give back what is no longer referred to, so that the next peak is that of the next work."""
    gc.collect()
    if is_separate(device):
        torch.get_device_module(device).empty_cache()
    else:
        with contextlib.suppress(OSError, AttributeError):  # glibc's
            ctypes.CDLL(None).malloc_trim(0)


def in_use(device: torch.device) -> int:
    if is_separate(device):
        return torch.get_device_module(device).memory_allocated(device)
    return _status('VmRSS') or _highest()


def reset_peak(device: torch.device) -> None:
    if is_separate(device):
        torch.get_device_module(device).reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # Linux only: elsewhere the peak is that of the process so far
            Path('/proc/self/clear_refs').write_text('5')


def peak(device: torch.device) -> int:
    """The most since `reset_peak`."""
    if is_separate(device):
        return torch.get_device_module(device).max_memory_allocated(device)
    return _status('VmHWM') or _highest()


def available(device: torch.device) -> int | None:
    """What the device, the container and the process's own limit leave; None where there is no limit."""
    if is_separate(device):
        return torch.get_device_module(device).mem_get_info(device)[0]
    found = [_field('/proc/meminfo', 'MemAvailable')]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        found.append(max(0, limit - (_status('VmSize') or 0)))
    for limit_file, usage_file in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # 'max' is no number, and no limit
            found.append(max(0, int(Path(limit_file).read_text()) - int(Path(usage_file).read_text())))
    known = [value for value in found if value is not None]
    return min(known) if known else None


def _highest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def _status(name: str) -> int | None:
    return _field(f'/proc/{os.getpid()}/status', name)


def _field(path: str, name: str) -> int | None:
    """A line such as `VmRSS:  1234 kB`, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f'{name}:'):
                return int(line.split()[1]) * 1024
    return None
