"""The errors of this package: each is one line of text and has an exit code (docs/reliability.md)."""

import contextlib
import os
import sys

from .exit_codes import Exit as Exit
from .terminal import coloured


class _UserMessage(Exception):
    """An error whose text is for people. torch hands on that of a loader worker with a traceback before it."""

    def __init__(self, text: object = '') -> None:
        text = str(text)
        if text.startswith('Caught ') and '\nOriginal Traceback' in text:
            text = text.rstrip().rsplit('\n', 1)[1].partition(': ')[2]
        super().__init__(text)


class InputError(_UserMessage, ValueError):
    """A mistake in what the user gave (a file, a folder, a value), told in one message with what would be right."""

    exit_code = Exit.INPUT


class RunError(_UserMessage, RuntimeError):
    """A run that cannot go on, told in one message with what there is to continue from."""

    exit_code = Exit.FAILED


class NotSaved(RunError):
    """Results or a checkpoint that the disk did not take in the end, told with what is missing."""

    exit_code = Exit.NOT_SAVED


class BadImage(InputError):
    """An image that cannot be read, or would not fit into memory."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def printable(text: str) -> str:
    """Text that any terminal and file takes on one line: file names may hold any byte but a slash."""
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in text)


def in_one_line(error: BaseException) -> str:
    """What a command says before it ends, with the rank where it is not the main one."""
    rank = os.environ.get('RANK', '0')
    return f'error: {error}' if rank == '0' else f'error (rank {rank}): {error}'


def exit_with(error: InputError | RunError) -> Exit:
    """Print what went wrong, if standard error is open; returns the exit code."""
    with contextlib.suppress(OSError):  # the log may lie on the disk that is full
        kind, colon, text = in_one_line(error).partition(':')
        print(f'{coloured(kind + colon, sys.stderr, "bold", "red")}{text}', file=sys.stderr, flush=True)
    return error.exit_code
