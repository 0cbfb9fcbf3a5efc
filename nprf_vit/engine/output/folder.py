"""The output folder: whose it is, and the small files in it."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nprf_vit.config.schema import Config, differences
from nprf_vit.config.yaml_file import dump_config, load_config
from nprf_vit.engine.checkpoint.file import checkpoints, set_aside
from nprf_vit.errors import InputError, first_line

from .atomic_file import remove_leftovers, write_text
from .bias_log import BiasLog
from .csv_file import write_rows
from .line_log import SkipLog, StepLog
from .lock import SoleWriter
from .metric_loggers import MetricLoggers
from .provenance import provenance

_LAUNCHES, _LARGEST_LAUNCHES = 'launches.json', 2**24  # bytes; some 500 for each start


class Output:
    """A run's output folder. The main rank holds its lock and writes; on the others nothing is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, SoleWriter(folder)
        self.steps: StepLog | None = None
        self.skips: SkipLog | None = None
        self.biases: BiasLog | None = None
        self.loggers = MetricLoggers({})

    def hold(self, stack: contextlib.ExitStack) -> None:
        """Take the lock on `stack` if there is a folder, so that nothing changes in it any more. Main rank."""
        with _refusals_as_input_errors(self.folder):
            if self.folder.is_dir():
                stack.enter_context(self.lock)

    def open(self, config: Config, world: int, stack: contextlib.ExitStack) -> list[str]:
        """Create the folder, note the configuration and what runs it; returns messages. Main rank."""
        with _refusals_as_input_errors(self.folder):
            if not self.lock.held:
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(self.lock)
                check_output(self.folder, config, None)  # another start may have been faster, and ended since
            self.lock.check()
            remove_leftovers(self.folder)
            write_text(self.folder / 'config.yaml', dump_config(config))
            launches, messages = _read_launches(self.folder / _LAUNCHES)
            write_text(self.folder / _LAUNCHES, json.dumps([*launches, provenance(world)], indent=2) + '\n')
        return messages

    def continue_from(self, step: int, history: list[dict[str, Any]], bad: dict[Path, str]) -> list[str]:
        """Tables and logs as they were at a step, open for what follows; returns messages. Main rank.

        Args:
            bad: Checkpoints after that step and what is wrong with them.
        """
        with _refusals_as_input_errors(self.folder):
            messages = [f'{text}; set aside as {set_aside(path).name}' for path, text in bad.items()]
            if history:
                write_rows(self.folder / 'summary.csv', history)
            else:
                (self.folder / 'summary.csv').unlink(missing_ok=True)
            self.steps = StepLog(self.folder / 'steps.csv', step)
            self.skips = SkipLog(self.folder / 'skipped_steps.jsonl', step)
            self.biases = BiasLog(self.folder / 'rel_pos_bias.jsonl', len(history))
        return messages


@contextlib.contextmanager
def _refusals_as_input_errors(folder: Path) -> Iterator[None]:
    """What the system refuses at the start of a run is a mistake in its input."""
    try:
        yield
    except OSError as error:
        raise InputError(f'cannot write to the output folder {folder}: {error}') from error


def check_output(folder: Path, config: Config, resume: str | None) -> None:
    """Refuse a folder that belongs to another run. Reads only, so every rank may call it."""
    with _refusals_as_input_errors(folder):
        saved = folder / 'config.yaml'
        changed = differences(load_config(saved).to_dict(), config.to_dict()) if saved.is_file() else []
        if changed:
            raise InputError(
                f'the output folder {folder} belongs to a different configuration ({"; ".join(changed[:8])}): '
                'choose another with --output (to train on from its weights: initial_checkpoint)'
            )
        if not resume and checkpoints(folder):
            raise InputError(
                f'{folder} holds a run already: continue it with --resume auto, or choose another --output'
            )
        if folder.exists() and not folder.is_dir():
            raise InputError(f'the output folder {folder} is a file')


def _read_launches(path: Path) -> tuple[list[Any], list[str]]:
    """What is on record, and a message if it cannot be read: no run depends on it."""
    if not path.is_file():
        return [], []
    try:
        if path.stat().st_size > _LARGEST_LAUNCHES:
            raise ValueError('too large')
        launches = json.loads(path.read_text(encoding='utf-8'))
        if not isinstance(launches, list):
            raise ValueError('not a list')
    except (OSError, ValueError, RecursionError) as error:
        return [], [f'{path} cannot be read ({first_line(error)}); set aside as {set_aside(path).name}']
    return launches, []


def check_space(folder: Path, needed: int) -> None:
    """Refuse a disk that could not even take the first checkpoint."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f'{folder} has {free / 2**20:.0f} MiB left, and a checkpoint of this run takes {needed / 2**20:.0f} MiB: '
            'make room, or choose another --output'
        )
