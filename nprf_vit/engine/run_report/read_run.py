"""What a run has left in its folder, read for its report; every complaint names the file and what is wrong with it."""

import csv
import errno
import fcntl
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nprf_vit.config.schema import Config
from nprf_vit.config.yaml_file import load_config
from nprf_vit.engine.hard_images import FILE as HARD_IMAGES
from nprf_vit.errors import InputError, first_line

Column = list[float | None]
_LARGEST = 2**28  # bytes of a table or log: a run of a year stays below


@dataclass
class RunRecord:
    """A run: its configuration, its tables by column, and what else there is."""

    folder: Path
    config: Config
    epochs: dict[str, Column]
    steps: dict[str, Column] = field(default_factory=dict)
    launches: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    bad_images: list[dict[str, str]] = field(default_factory=list)
    biases: list[dict[str, Any]] = field(default_factory=list)
    hard_images: dict[str, Any] | None = None
    busy: bool = False  # another process is writing to it

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def done(self) -> int:
        return len(self.epochs['epoch'])

    @property
    def state(self) -> str:
        if self.done >= self.config.epochs:
            return 'finished'
        return f'{"under way" if self.busy else "stopped"}, epoch {self.done} of {self.config.epochs}'


def read_run(folder: Path) -> RunRecord:
    """Everything in the folder of a run that has finished its first epoch."""
    if not folder.exists():
        raise InputError(f'no such run: there is no folder {folder}')
    if not folder.is_dir():
        raise InputError(f'no such run: {folder} is a file, expected the folder that train.py wrote')
    try:
        return _read_run(folder)
    except OSError as error:
        raise InputError(f'cannot read the run {folder}: {error.strerror or error}') from error


def _read_run(folder: Path) -> RunRecord:
    if not (folder / 'config.yaml').is_file():
        raise InputError(f'{folder} holds no run: expected config.yaml and summary.csv, as train.py writes them')
    config = load_config(folder / 'config.yaml')
    busy = _is_locked(folder)
    if not (folder / 'summary.csv').is_file():
        state = 'is under way and' if busy else 'stopped before it'
        raise InputError(f'the run {folder} {state} has not finished an epoch: there is nothing to report yet')
    return RunRecord(
        folder,
        config,
        _read_table(folder / 'summary.csv', ('epoch', 'step', 'lr', 'train_loss')),
        _read_table(folder / 'steps.csv', ('step', 'epoch', 'loss')) if (folder / 'steps.csv').is_file() else {},
        _read_json(folder / 'launches.json', list),
        _read_lines(folder / 'skipped_steps.jsonl', 'step', 'reason'),
        _read_bad_images(folder / 'bad_images.csv'),
        _read_lines(folder / 'rel_pos_bias.jsonl', 'epoch', 'tables'),
        _read_json(folder / HARD_IMAGES, dict, 'model', 'unit', 'worst', 'confused') or None,
        busy,
    )


def _is_locked(folder: Path) -> bool:
    """Whether a run holds the folder, by the lock of engine/output/lock.py."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    finally:
        os.close(descriptor)


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        raise InputError(f'{path} has {path.stat().st_size} bytes: expected at most {_LARGEST}')
    try:
        return path.read_text(encoding='utf-8')
    except UnicodeDecodeError as error:
        raise InputError(f'{path} is damaged: {first_line(error)}') from None


def _read_table(path: Path, needed: tuple[str, ...]) -> dict[str, Column]:
    """Numbers by column; empty cells are None. A last line without an end is one that is being written."""
    text = _text(path)
    lines = text.splitlines() if text.endswith('\n') else text.splitlines()[:-1]
    try:
        rows = list(csv.reader(lines, strict=True))
    except csv.Error as error:
        raise InputError(f'{path} is damaged: {first_line(error)}') from None
    names = rows[0] if rows else []
    missing = [name for name in needed if name not in names]
    if missing:
        raise InputError(f'{path} is damaged: its first line has no {", ".join(missing)}')
    if len(rows) == 1 and path.name == 'summary.csv':
        raise InputError(f'{path} is damaged: it has no row')
    table: dict[str, Column] = {name: [] for name in names}
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            raise InputError(f'{path}:{number} is damaged: {len(row)} cells, expected {len(names)}')
        for name, cell in zip(names, row):
            table[name].append(_number(cell, f'{path}:{number}', name))
    return table


def _number(cell: str, where: str, name: str) -> float | None:
    if not cell:
        return None
    try:
        value = float(cell)
    except ValueError:
        raise InputError(f'{where} is damaged: {name} is {cell[:40]!r}, expected a number') from None
    return value if math.isfinite(value) else None  # JSON has no word for the others


def _no_number(text: str) -> None:
    """For NaN and the infinities, which Python writes and browsers do not read."""


def _read_json(path: Path, kind: type[list] | type[dict], *needed: str) -> Any:
    if not path.is_file():
        return kind()
    try:
        content = json.loads(_text(path), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InputError(f'{path} is damaged: {first_line(error)}') from None
    if not isinstance(content, kind) or any(name not in content for name in needed):
        raise InputError(f'{path} is damaged: expected a {kind.__name__} {", ".join(needed)}'.rstrip())
    return content


def _read_lines(path: Path, *needed: str) -> list[dict[str, Any]]:
    """An object per line; a last line without an end is one that is being written."""
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(_text(path).splitlines(keepends=True), 1):
        if not line.endswith('\n'):
            break
        try:
            record = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise InputError(f'{path}:{number} is damaged: {first_line(error)}') from None
        if not isinstance(record, dict) or any(name not in record for name in needed):
            raise InputError(f'{path}:{number} is damaged: expected an object with {", ".join(needed)}')
        found.append(record)
    return found


def _read_bad_images(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    rows = list(csv.reader(_text(path).splitlines()))
    return [dict(zip(('index', 'problem'), row)) for row in rows[1:]]
