"""Log files of a line per event, which survive a kill, a full disk, and a continuation from an earlier step."""

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from .atomic_file import write_text
from .csv_file import format_header, format_rows


class LineLog(ABC):
    """Lines appended in step order.

    A continuation first drops what came after its checkpoint. Lines that the disk does not take wait for the next
    attempt, and a checkpoint is written only after them, so the file holds every line up to each checkpoint.
    """

    header = ''

    def __init__(self, path: Path, step: int) -> None:
        kept: list[str] = []
        if path.is_file() and step:
            lines = path.read_text(encoding='utf-8', errors='replace').splitlines(keepends=True)
            steps = [(self.step_of(line), line) for line in lines[bool(self.header) :] if line.endswith('\n')]
            kept = [line for number, line in steps if number is not None and number <= step]
        self.path = path
        self.pending: list[str] = []
        text = self.header + ''.join(kept)
        self.end = len(text.encode())
        if text:
            write_text(path, text)
        else:
            path.unlink(missing_ok=True)

    @abstractmethod
    def step_of(self, line: str) -> int | None:
        """The step that a line is about; None for a line that is damaged."""

    def append(self, line: str) -> None:
        """A line with its end."""
        self.pending.append(line)

    def flush(self, sync: bool = False) -> None:
        """Write what is pending; OSError if the disk does not take it, and nothing is lost."""
        if not self.pending and not (sync and self.end):
            return
        data = ''.join(self.pending).encode()
        # not 'ab': an attempt that failed half-way has left a part of a line, which the next one writes over
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.ftruncate(descriptor, self.end)
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], self.end + written)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.end += len(data)
        self.pending.clear()


class StepLog(LineLog):
    """`steps.csv`: a row per logging interval."""

    columns = ('step', 'epoch', 'loss', 'lr', 'images_per_s', 'data_wait')
    header = format_header(columns)

    def step_of(self, line: str) -> int | None:
        first = line.split(',', 1)[0]
        return int(first) if line.count(',') == len(self.columns) - 1 and first.isdecimal() else None

    def add(self, row: dict[str, Any]) -> None:
        self.append(format_rows([row], self.columns))


class SkipLog(LineLog):
    """`skipped_steps.jsonl`: an object per step without an update, with the images that it held."""

    def step_of(self, line: str) -> int | None:
        try:
            return int(json.loads(line)['step'])
        except (ValueError, KeyError, TypeError):
            return None

    def add(self, record: dict[str, Any]) -> None:
        self.append(json.dumps(record) + '\n')
