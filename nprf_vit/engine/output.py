"""The output folder: whose it is, and the small files in it."""

import csv
import json
import os
from pathlib import Path
from typing import Any

from ..errors import InputError
from .config import Config, differences
from .config_file import dump_config, load_config
from .provenance import provenance


def check_output(folder: Path, config: Config, resume: str | None) -> None:
    """Refuse a folder that belongs to another run. Reads only, so every rank may call it."""
    saved = folder / 'config.yaml'
    if saved.is_file():
        changed = differences(load_config(saved).to_dict(), config.to_dict())
        if changed:
            raise InputError(
                f'the output folder {folder} belongs to a different configuration ({"; ".join(changed[:8])}): '
                'choose another with --output'
            )
    if (folder / 'last.pt').is_file() and not resume:
        raise InputError(f'{folder} holds a run already: continue it with --resume auto, or choose another --output')
    if folder.exists() and not folder.is_dir():
        raise InputError(f'the output folder {folder} is a file')


def open_output(folder: Path, config: Config, world: int) -> None:
    """Create the folder and note the configuration and what runs it; main rank only."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / 'config.yaml', dump_config(config))
        launches = []
        if (folder / 'launches.json').is_file():
            launches = json.loads((folder / 'launches.json').read_text(encoding='utf-8'))
        write_text(folder / 'launches.json', json.dumps([*launches, provenance(world)], indent=2) + '\n')
    except OSError as error:
        raise InputError(f'cannot write to the output folder {folder}: {error}') from error


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole."""
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    temporary.write_text(text, encoding='utf-8')
    os.replace(temporary, path)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """A CSV file of these rows, replaced as a whole, so that it never holds a row twice or a part of one."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [','.join(names)]
    lines += [','.join('' if row.get(name) is None else str(row[name]) for name in names) for row in rows]
    write_text(path, '\n'.join(lines) + '\n')


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline='', encoding='utf-8') as stream:
        return list(csv.DictReader(stream))


class StepLog:
    """`steps.csv`: a line per logging interval, appended; a continuation first drops what came after its checkpoint."""

    columns = ('step', 'epoch', 'loss', 'lr', 'images_per_s', 'data_wait')

    def __init__(self, path: Path, step: int):
        kept = []
        if path.is_file() and step:
            lines = path.read_text(encoding='utf-8').splitlines(keepends=True)[1:]
            complete = [line for line in lines if line.endswith('\n') and line.count(',') == len(self.columns) - 1]
            kept = [line for line in complete if int(line.split(',', 1)[0]) <= step]
        write_text(path, ','.join(self.columns) + '\n' + ''.join(kept))
        self.stream = open(path, 'a', encoding='utf-8')  # noqa: SIM115 - lives as long as the run

    def add(self, **row: Any) -> None:
        self.stream.write(','.join(str(row[name]) for name in self.columns) + '\n')
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()
