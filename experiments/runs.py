"""Small training runs for the experiments: each trained once, two at a time, and continued where it was interrupted.

An experiment is a list of runs and a CSV file, in a folder of its own. Where a command continues another, what the file
holds is not done again, nor is a run that is trained but not in the file yet; both are printed.
"""

import contextlib
import fcntl
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.report import Report
from nprf_vit.config.schema import Config
from nprf_vit.config.yaml_file import load_config, override
from nprf_vit.engine.distributed.process_group import process_group
from nprf_vit.engine.output.csv_file import append_rows, read_rows
from nprf_vit.engine.output.folder import check_output
from nprf_vit.engine.tasks.registry import task_of
from nprf_vit.engine.train import train
from nprf_vit.engine.validate import validate

ROOT = Path(__file__).parent.parent
FASHION, PIXEL = 'configs/fashion_12px.yaml', 'configs/digits_pixel.yaml'
CIFAR, CIFAR_PIXEL = 'configs/cifar10_small.yaml', 'configs/cifar10_pixel_16px.yaml'

_SHORT = ('epochs=2', 'epoch_steps=3', 'warmup_epochs=1', 'global_batch=8', 'batch_size=8', 'log_interval=1')
_TINY = ('model_kwargs.embed_dim=16', 'model_kwargs.depth=1', 'model_kwargs.num_heads=2')
_DIGITS = ('dataset=digits', 'train_images=1437', 'val_images=360')  # where no folder of images is given
_GREY = ('in_chans=1', 'mean=[0.286]', 'std=[0.353]')
_ANY_NUMBER = ('train_images=null', 'val_images=null')


def quick_changes(config: str, data_dir: str | None) -> tuple[str, ...]:
    """Overrides that make a run take a second."""
    small = (*_SHORT, *_TINY, 'val_limit=40')
    if config == PIXEL:
        return small
    if config == CIFAR_PIXEL:
        own = (*small, 'torchcompile=null', 'val_limit=16')
        return own if data_dir else (*own, *_DIGITS, 'img_size=8', 'in_chans=1', 'model_kwargs.levels=17')
    grey = _GREY if config == CIFAR and not data_dir else ()
    return (*small, 'img_size=8', 'torchcompile=null', *(_ANY_NUMBER if data_dir else _DIGITS), *grey)


@dataclass(frozen=True)
class Run:
    """A configuration file and what differs from it, as `--set` takes it."""

    variant: str
    seed: int = 0
    changes: tuple[str, ...] = ()
    config: str = FASHION
    file: str = ''  # of the images, where they are not the data folder itself

    @property
    def name(self) -> str:
        return f'{self.variant}-{self.seed}'

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*self.changes, f'seed={self.seed}')

    def command(self, script: str = 'train.py') -> str:
        data = '' if self.config == PIXEL else f' --data-dir {Path("DIR") / self.file}'
        quoted = (f"'{c}'" if ' ' in c else c for c in self.overrides)
        return f'python {script} --config {self.config}{data} --set {" ".join(quoted)}'


class Table:
    """A CSV file that grows a row at a time, and knows which rows it has."""

    def __init__(self, path: Path, key: tuple[str, ...]):
        self.path, self.key = path, key
        self.rows: list[dict[str, Any]] = read_rows(path) if path.is_file() else []

    def cases(self) -> list[str]:
        """What there are rows of, by the columns of the key."""
        return list(dict.fromkeys('-'.join(row[name] for name in self.key) for row in self.rows))

    def has(self, **key: Any) -> bool:
        return any(all(row[name] == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, *rows: dict[str, Any]) -> None:
        """Append rows to the file, and keep them as text, as a reader of the file would."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_rows(self.path, rows)
        self.rows += [{name: str(value) for name, value in row.items()} for row in rows]

    def values(self, column: str, **key: Any) -> list[float]:
        """The numbers of a column in the rows that match."""
        match = (row for row in self.rows if all(row[name] == str(value) for name, value in key.items()))
        return [float(row[column]) for row in match]


class Unfinished(Exception):
    """Runs are left to do: time is up, or another process is training them."""


@dataclass
class Runner:
    """Trains runs and collects their rows: folders, number of processes, deadline.

    Args:
        work: Folder of the trained runs.
        report: Where tables and pictures go.
        jobs: Processes at a time; 1 works in this one.
        deadline: Time of the system's clock at which to stop, or None.
        images: What to learn, where an experiment has a choice.
    """

    work: Path
    report: Report
    data_dir: str | None
    jobs: int
    deadline: float | None
    images: str | None = None

    @property
    def quick(self) -> bool:
        return self.report.quick

    def config(self, run: Run) -> Config:
        """What a run trains, small if quick; the run's own changes come last, save its length."""
        small = quick_changes(run.config, self.data_dir) if self.quick else ()
        config = load_config(ROOT / run.config, [*small, *run.overrides, *(c for c in small if c in _SHORT)])
        return override(config, data_dir=str(Path(self.data_dir) / run.file)) if self.data_dir else config

    @contextlib.contextmanager
    def table(self, name: str, key: tuple[str, ...], report: Callable, plot: Callable) -> Iterator[Table]:
        """An experiment's table: its report printed as far as there is one, its picture drawn when it is complete."""
        table = Table(self.report.path(f'{name}.csv'), key)
        if table.rows:
            print(f'{len(table.rows)} rows taken over from {table.path}: {", ".join(table.cases())}')
        try:
            yield table
        finally:
            if table.rows:
                self.report.table(report(table))
        picture = self.report.path(f'{name}.png')
        plot(table, picture)
        print(f'wrote {table.path.name} and {picture.name} in {self.report.folder}')

    def folder(self, run: Run) -> Path:
        return self.work / run.name

    def each(self, function: Callable, items: Iterable[tuple], what: str = 'runs') -> Iterator[tuple[tuple, Any]]:
        """Pairs of an item and function(*item, deadline), as they finish; raises Unfinished if one returned None."""
        items, left = list(items), 0
        with tqdm(total=len(items), desc=what, disable=not items) as bar:
            for item, result in self._results(function, items):
                if result is None:
                    left += 1
                else:
                    bar.update()  # the bar counts what was done
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
        """Pairs of a run and the last line of its summary: first those trained before, then others as they finish."""
        configs = {run: self.config(run) for run in runs}
        rows = {run: trained(config, self.folder(run)) for run, config in configs.items()}
        before = {run: row for run, row in rows.items() if row is not None}
        if before:
            print(
                f'{len(before)} runs trained before, taken over from {self.work}: {", ".join(r.name for r in before)}'
            )
        yield from before.items()
        left = {self.folder(run): run for run, row in rows.items() if row is None}
        if left:
            check_data(configs[next(iter(left.values()))])
        for (_, folder), row in self.each(train_run, [(configs[run], folder) for folder, run in left.items()]):
            yield left[folder], row

    def fill(self, table: Table, runs: Iterable[Run], metrics: tuple[str, ...]) -> None:
        """Train what the table does not have, and add a row for each."""
        pending = [run for run in runs if not table.has(variant=run.variant, seed=run.seed)]
        for run, last in self.train(pending):
            row = {'variant': run.variant, 'seed': run.seed, 'steps': last['step']}
            row |= {name: f'{float(last[name]):.6g}' for name in ('train_loss', *metrics)}
            table.add({**row, 'command': run.command()})


def check_data(config: Config) -> None:
    """Complain about missing images before the first run is started, not from inside it."""
    for split in ('train', 'validation'):
        task_of(config).open_images(config, split)


def trained(config: Config, folder: Path) -> dict[str, str] | None:
    """The last line of the summary of a run that is complete; refuses one of another configuration."""
    summary = folder / 'summary.csv'
    if not summary.is_file():
        return None
    check_output(folder, config, 'auto')
    last = read_rows(summary)[-1]
    return last if last['epoch'] == str(config.epochs) else None


def train_run(config: Config, folder: Path, deadline: float | None = None) -> dict[str, str] | None:
    """Train to the end, continuing what the folder has; None if the deadline or another process was there first."""
    if passed(deadline):
        return None
    with quiet(folder) as place, (folder / 'lock').open('w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another experiment is training it
            return None
        done = train(config, place, folder, 'auto', lambda step: passed(deadline))
    return None if done is None else read_rows(folder / 'summary.csv')[-1]


def validate_run(config: Config, folder: Path, deadline: float | None = None) -> dict | None:
    """Measure the weights that a configuration starts from; None if the deadline was there first."""
    if passed(deadline):
        return None
    with quiet(folder) as place:
        return validate(config, place)


def passed(deadline: float | None) -> bool:
    return deadline is not None and time.time() > deadline


@contextlib.contextmanager
def quiet(folder: Path) -> Iterator[Any]:
    """A process group of one CPU process, whose output goes to a log file."""
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


def with_spread(values: list[float], digits: int = 2) -> str:
    """Mean ± deviation for a table, or the one number there is."""
    mean, spread = mean_and_spread(values)
    return f'{mean:.{digits}f}' + ('' if math.isnan(spread) else f' ± {spread:.{digits}f}')
