"""Processes that end with their parent, and what they print."""

import ctypes
import io
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, however that happens (Linux only)."""
    if sys.platform.startswith('linux'):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def print_any_name() -> None:
    """File names may hold what the terminal's encoding lacks: escaped, where Python would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')
