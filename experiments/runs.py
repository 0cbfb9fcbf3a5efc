"""Small training runs for the experiments: each trained once, two at a time, and continued where it was interrupted.

An experiment is a list of runs and a CSV file. What the file holds already is not done again; a run that is trained but
not in the file yet is not trained again. So a command may be stopped and repeated, and experiments share their runs.
"""

import contextlib
import csv
import fcntl
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import destination, markdown, options
from nprf_vit.engine.config import Config
from nprf_vit.engine.config_file import load_config, override
from nprf_vit.engine.distributed import process_group
from nprf_vit.engine.output import read_rows
from nprf_vit.engine.train import train
from nprf_vit.errors import InputError

ROOT = Path(__file__).parent.parent
UNFINISHED = 75  # exit code of a command that is to be repeated: "temporary failure" in sysexits.h
FASHION, PIXEL = 'configs/fashion_12px.yaml', 'configs/digits_pixel.yaml'

_SHORT = ('epochs=2', 'epoch_steps=3', 'warmup_epochs=1', 'global_batch=8', 'batch_size=8', 'log_interval=1')
_TINY = ('model_kwargs.embed_dim=16', 'model_kwargs.depth=1', 'model_kwargs.num_heads=2')
QUICK = {
    FASHION: (*_SHORT, *_TINY, 'img_size=8', 'dataset=digits', 'train_images=1437', 'val_images=360', 'val_limit=40'),
    PIXEL: (*_SHORT, *_TINY, 'val_limit=40'),
}


@dataclass(frozen=True)
class Run:
    """A configuration file and what differs from it, as `--set` takes it."""

    variant: str
    seed: int = 0
    changes: tuple[str, ...] = ()
    config: str = FASHION

    @property
    def name(self) -> str:
        return f'{self.variant}-{self.seed}'

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*self.changes, f'seed={self.seed}')

    def command(self, script: str = 'train.py') -> str:
        data = '' if self.config == PIXEL else ' --data-dir DIR'
        quoted = (f"'{c}'" if ' ' in c else c for c in self.overrides)
        return f'python {script} --config {self.config}{data} --set {" ".join(quoted)}'


class Table:
    """A CSV file that grows a row at a time, and knows which rows it has."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = read_rows(path) if path.is_file() else []

    def has(self, **key: Any) -> bool:
        return any(all(row[name] == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, *rows: dict[str, Any]) -> None:
        """Append rows, and have them as a reader of the file would."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.is_file()
        with self.path.open('a', newline='', encoding='utf-8') as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator='\n')
            if fresh:
                writer.writeheader()
            writer.writerows(rows)
        self.rows += [{name: str(value) for name, value in row.items()} for row in rows]

    def values(self, column: str, **key: Any) -> list[float]:
        """The numbers of a column in the rows that match."""
        match = (row for row in self.rows if all(row[name] == str(value) for name, value in key.items()))
        return [float(row[column]) for row in match]


class Unfinished(Exception):
    """Work is left, because time is up or somebody else is at it."""


@dataclass
class Lab:
    """Where runs live and how they are done.

    Args:
        work: Folder of the trained runs.
        output: Folder of the tables and pictures.
        jobs: Processes at a time; 1 works in this one.
        deadline: Time of the system's clock at which to stop, or None.
    """

    work: Path
    output: Path
    data_dir: str | None
    quick: bool
    jobs: int
    deadline: float | None

    def config(self, run: Run) -> Config:
        """What a run trains, small if quick; the run's own changes come last, save its length."""
        changes = [*(QUICK[run.config] if self.quick else ()), *run.overrides]
        if self.quick:
            changes += [c for c in QUICK[run.config] if c in _SHORT]
        config = load_config(ROOT / run.config, changes)
        return override(config, data_dir=self.data_dir) if self.data_dir else config

    @contextlib.contextmanager
    def table(self, name: str, report: Callable, plot: Callable) -> Iterator[Table]:
        """An experiment's table: its report printed as far as there is one, its picture drawn when it is complete."""
        table = Table(self.output / f'{name}.csv')
        try:
            yield table
        finally:
            rows = report(table)
            if rows:
                print(markdown(rows))
        plot(table, self.output / f'{name}.png')

    def folder(self, run: Run) -> Path:
        return self.work / run.name

    def each(self, function: Callable, items: Iterable[tuple], what: str = 'runs') -> Iterator[tuple[tuple, Any]]:
        """Pairs of an item and function(*item, deadline), as they finish; raises Unfinished if one returned None."""
        items, left = list(items), 0
        for item, result in tqdm(self._results(function, items), total=len(items), desc=what, disable=not items):
            if result is None:
                left += 1
            else:
                yield item, result
        if left:
            raise Unfinished(f'{left} of {len(items)} {what} are left')

    def _results(self, function: Callable, items: list[tuple]) -> Iterator[tuple[tuple, Any]]:
        if self.jobs == 1 or len(items) < 2:
            for item in items:
                yield item, function(*item, self.deadline)
            return
        # spawned, not forked: a fork inherits torch's locked thread pools
        with ProcessPoolExecutor(self.jobs, get_context('spawn')) as pool:
            futures = {pool.submit(function, *item, self.deadline): item for item in items}
            for future in as_completed(futures):
                yield futures[future], future.result()

    def train(self, runs: Iterable[Run]) -> Iterator[tuple[Run, dict[str, str]]]:
        """Pairs of a run and the last line of its summary, as they finish."""
        by_folder = {self.folder(run): run for run in runs}
        items = [(self.config(run), folder) for folder, run in by_folder.items()]
        for (_, folder), row in self.each(train_run, items):
            yield by_folder[folder], row

    def fill(self, table: Table, runs: Iterable[Run], metrics: tuple[str, ...]) -> None:
        """Train what the table does not have, and add a row for each."""
        pending = [run for run in runs if not table.has(variant=run.variant, seed=run.seed)]
        for run, last in self.train(pending):
            row = {'variant': run.variant, 'seed': run.seed, 'steps': last['step']}
            row |= {name: f'{float(last[name]):.6g}' for name in ('train_loss', *metrics)}
            table.add({**row, 'command': run.command()})


def train_run(config: Config, folder: Path, deadline: float | None = None) -> dict[str, str] | None:
    """Train to the end, continuing what the folder has; None if the deadline or another process was there first."""
    summary = folder / 'summary.csv'
    if summary.is_file() and read_rows(summary)[-1]['epoch'] == str(config.epochs):
        return read_rows(summary)[-1]
    if passed(deadline):
        return None
    with quiet(folder) as place, (folder / 'lock').open('w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another experiment is training it
            return None
        done = train(config, place, folder, 'auto', lambda step: passed(deadline))
    return None if done is None else read_rows(summary)[-1]


def passed(deadline: float | None) -> bool:
    return deadline is not None and time.time() > deadline


@contextlib.contextmanager
def quiet(folder: Path) -> Iterator[Any]:
    """The place of a single process on a CPU whose words go to a log file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / 'log.txt').open('a', encoding='utf-8') as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
        process_group('cpu', threads=1) as place,
    ):
        yield place


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation between runs (nan for one)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def said(values: list[float], digits: int = 2) -> str:
    """Mean ± deviation for a table, or the one number there is."""
    mean, spread = mean_and_spread(values)
    return f'{mean:.{digits}f}' + ('' if math.isnan(spread) else f' ± {spread:.{digits}f}')


def main(about: str, experiment: Callable[[Lab], None], argv: list[str] | None = None) -> int:
    """Parse the arguments all experiments share, run one, and tell whether it is to be repeated."""
    parser = options(about)
    parser.add_argument('--data-dir', help='folder of FashionMNIST, as in configs/fashion_mnist.yaml')
    parser.add_argument('--work', type=Path, help='folder of the trained runs (default: output/runs)')
    parser.add_argument('--jobs', type=int, help='processes, of one thread each (default: 2)')
    parser.add_argument('--minutes', type=float, help=f'stop after so long, with exit code {UNFINISHED}')
    args = parser.parse_args(argv)
    work = args.work or Path('output') / ('runs_quick' if args.quick else 'runs')
    lab = Lab(
        work=work,
        output=destination(args) or work,
        data_dir=args.data_dir,
        quick=args.quick,
        jobs=args.jobs or (1 if args.quick else 2),
        deadline=None if args.minutes is None else time.time() + 60 * args.minutes,
    )
    try:
        experiment(lab)
    except Unfinished as left:
        print(f'{left}; the same command continues', file=sys.stderr)
        return UNFINISHED
    except InputError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0
