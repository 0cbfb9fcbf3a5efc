"""The output folder: whose it is, and the small files in it."""

import contextlib
import csv
import json
import shutil
from pathlib import Path
from typing import Any

from ..errors import InputError
from .atomic import remove_leftovers, write_text
from .checkpoint import checkpoints
from .config import Config, differences
from .config_file import dump_config, load_config
from .lock import sole_writer
from .provenance import provenance


def check_output(folder: Path, config: Config, resume: str | None) -> None:
    """Refuse a folder that belongs to another run. Reads only, so every rank may call it."""
    saved = folder / 'config.yaml'
    if saved.is_file():
        changed = differences(load_config(saved).to_dict(), config.to_dict())
        if changed:
            raise InputError(
                f'the output folder {folder} belongs to a different configuration ({"; ".join(changed[:8])}): '
                'choose another with --output (to train on from its weights: initial_checkpoint)'
            )
    if not resume and checkpoints(folder):
        raise InputError(f'{folder} holds a run already: continue it with --resume auto, or choose another --output')
    if folder.exists() and not folder.is_dir():
        raise InputError(f'the output folder {folder} is a file')


def open_output(folder: Path, config: Config, world: int, stack: contextlib.ExitStack) -> None:
    """Create the folder, take its lock on `stack`, note the configuration and what runs it; main rank only."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(sole_writer(folder))
        remove_leftovers(folder)
        write_text(folder / 'config.yaml', dump_config(config))
        launches = []
        if (folder / 'launches.json').is_file():
            launches = json.loads((folder / 'launches.json').read_text(encoding='utf-8'))
        write_text(folder / 'launches.json', json.dumps([*launches, provenance(world)], indent=2) + '\n')
    except OSError as error:
        raise InputError(f'cannot write to the output folder {folder}: {error}') from error


def check_space(folder: Path, needed: int) -> None:
    """Refuse a disk that could not even take the first checkpoint."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f'{folder} has {free / 2**20:.0f} MiB left, and a checkpoint of this run takes {needed / 2**20:.0f} MiB: '
            'make room, or choose another --output'
        )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """A CSV file of these rows, replaced as a whole, so that it never holds a row twice or a part of one."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [','.join(names)]
    lines += [','.join('' if row.get(name) is None else str(row[name]) for name in names) for row in rows]
    write_text(path, '\n'.join(lines) + '\n')


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline='', encoding='utf-8') as stream:
        return list(csv.DictReader(stream))
