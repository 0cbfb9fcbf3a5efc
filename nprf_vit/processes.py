"""Processes that do not outlive the one they work for."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, however that happens (Linux only)."""
    if sys.platform.startswith('linux'):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
