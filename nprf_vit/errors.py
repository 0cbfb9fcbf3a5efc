import os


class InputError(ValueError):
    """A mistake in what the user gave (a file, a folder, a value), told in one message with what would be right."""


class RunError(RuntimeError):
    """A run that cannot go on, told in one message with what there is to continue from."""


class BadImage(InputError):
    """An image that cannot be read, or would not fit into memory."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def in_one_line(error: BaseException) -> str:
    """What a command says before it ends, with the rank where it is not the main one."""
    rank = os.environ.get('RANK', '0')
    return f'error: {error}' if rank == '0' else f'error (rank {rank}): {error}'
