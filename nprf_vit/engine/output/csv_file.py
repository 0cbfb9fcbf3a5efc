"""Tables as CSV files: the one place that writes and reads them."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .atomic_file import write_text

Row = Mapping[str, Any]


def columns_of(rows: Iterable[Row]) -> list[str]:
    """The names in all rows, each where it first occurs."""
    return list(dict.fromkeys(name for row in rows for name in row))


def format_header(columns: Sequence[str]) -> str:
    return format_rows([dict(zip(columns, columns))], columns)


def format_rows(rows: Iterable[Row], columns: Sequence[str]) -> str:
    """A line per row; what a row lacks, and None, is empty."""
    stream = io.StringIO()
    csv.DictWriter(stream, columns, lineterminator='\n').writerows(rows)
    return stream.getvalue()


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A file of these rows, replaced as a whole, so that it never holds a row twice or a part of one."""
    columns = columns_of(rows)
    write_text(path, format_header(columns) + format_rows(rows, columns))


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Rows at the end of a file, which begins with their names if there is none yet."""
    columns = columns_of(rows)
    text = format_rows(rows, columns) if path.is_file() else format_header(columns) + format_rows(rows, columns)
    with open(path, 'a', newline='', encoding='utf-8') as stream:
        stream.write(text)


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline='', encoding='utf-8') as stream:
        return list(csv.DictReader(stream))
