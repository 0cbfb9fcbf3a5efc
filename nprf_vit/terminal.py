"""What only a terminal gets: colour, and a box around the results. Files and pipes get the same words plain."""

import os
import re
import shutil
from typing import TextIO

_CODES = {'bold': '1', 'red': '31', 'green': '32'}
_ESCAPE = re.compile(r'\x1b\[[\d;]*m')
_PLAIN = str.maketrans('╭╮╰╯─│', '++++-|')


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def takes_colour(stream: TextIO) -> bool:
    """A terminal that can, for a user who has not asked for none (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'


def coloured(text: str, stream: TextIO, *styles: str) -> str:
    """The text in these styles (bold, red, green) if it goes to such a terminal."""
    if not text or not takes_colour(stream):
        return text
    return f'\x1b[{";".join(_CODES[style] for style in styles)}m{text}\x1b[0m'


def boxed(text: str, stream: TextIO, title: str = '') -> str:
    """The text in a box if it goes to a terminal that is wide enough."""
    lines = [line.rstrip() for line in text.splitlines()]
    width = max([len(title) + 2 if title else 0, *(len(_ESCAPE.sub('', line)) for line in lines)])
    if not is_terminal(stream) or width + 4 > shutil.get_terminal_size().columns:
        return text
    head = f'─ {title} ' if title else ''
    rows = [f'│ {line}{" " * (width - len(_ESCAPE.sub("", line)))} │' for line in lines]
    box = '\n'.join([f'╭{head}{"─" * (width + 2 - len(head))}╮', *rows, f'╰{"─" * (width + 2)}╯'])
    return box if _can_write('╭─│', stream) else box.translate(_PLAIN)


def _can_write(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or 'ascii')
    except (UnicodeEncodeError, LookupError):
        return False
    return True
