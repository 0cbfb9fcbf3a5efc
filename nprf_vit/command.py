"""What train.py and validate.py share: closed or full standard streams, and paths that cannot exist."""

import contextlib
import os
import sys
from collections.abc import Callable

from .errors import InputError

_ABSENT = (FileNotFoundError, NotADirectoryError)  # whoever needs the file says so in its own words


def run_command(main: Callable[[], int]) -> int:
    """The exit code of `main`, whatever has become of the standard streams."""
    _open_closed_streams()
    code = main()
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:  # Python would try once more at its end, and make the exit code 120
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return int(code)


def _open_closed_streams() -> None:
    """Python has None for a closed stream, and the next file that is opened would get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    for name, number in (('stdout', 1), ('stderr', 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, 'w', encoding='utf-8', errors='replace', closefd=False))  # noqa: SIM115


def check_path(path: str | None, what: str) -> None:
    """Refuse a path that the system does not even look up: too long, or behind a folder that may not be entered."""
    if path is None:
        return
    try:
        os.lstat(path)
    except _ABSENT:
        pass
    except (OSError, ValueError) as error:
        shown = path if len(path) < 200 else f'{path[:200]}… ({len(path)} characters)'
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f'{what} {shown}: {reason}') from None
