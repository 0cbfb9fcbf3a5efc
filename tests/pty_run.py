"""Commands on a real terminal: a pseudo-terminal of a given width, with everything they write to it."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLOUR = '\x1b['


def on_terminal(command: Sequence[object], columns: int = 120, **environment: str) -> tuple[int, str]:
    """The exit code of a Python command and what a terminal gets of it, standard output and error together."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack('HHHH', 40, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ('NO_COLOR', 'COLUMNS', 'LINES')}
    env |= {'PYTHONPATH': str(ROOT), 'TERM': 'xterm', 'PYTHONUTF8': '1'} | environment
    words = [sys.executable, *map(str, command)]
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=env, close_fds=True)
    os.close(slave)
    parts = []
    with contextlib.suppress(OSError):  # EIO: the other side has ended
        while part := os.read(master, 65536):
            parts.append(part)
    os.close(master)
    return process.wait(), b''.join(parts).decode('utf-8', errors='replace')
