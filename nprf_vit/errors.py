class InputError(ValueError):
    """A mistake in what the user gave (a file, a folder, a value), told in one message with what would be right."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
