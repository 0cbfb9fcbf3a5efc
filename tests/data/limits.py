"""A process of its own with little memory, for files that would take much of it or bring the process down."""

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_limited(code: str, *args: object, megabytes: int = 800, seconds: int = 60) -> subprocess.CompletedProcess:
    """Run Python code, with `args` in sys.argv[1:], which may use so much memory beyond what its imports take.

    The code has a function `limit` to call after its imports.
    """
    start = f"""
import resource, sys
def limit():
    pages = int(open('/proc/self/statm').read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * {resource.getpagesize()} + {megabytes << 20},) * 2)
"""
    command = [sys.executable, '-c', start + code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
