"""What people see: a progress bar, a line per epoch, one table at the end."""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
from tqdm import tqdm

from nprf_vit.config.schema import Config
from nprf_vit.engine.tasks.base import Task

from . import curves
from .csv_file import write_rows
from .metric_loggers import MetricLoggers
from .numbers import decimals, duration

_QUIET_SECONDS = 60  # between lines of a log file, and between drawings of the curves


def model_title(config: Config) -> str:
    """The model's name with what the configuration changed in it, as its size alone would be that of another."""
    own = timm.models.get_pretrained_cfg(config.model, allow_unregistered=True)
    changed = dict(config.model_kwargs)
    if own is not None:
        channels, *size = own.input_size
        given = {'img_size': config.img_size, 'in_chans': config.in_chans, 'num_classes': config.num_classes}
        defaults = {'img_size': size[0], 'in_chans': channels, 'num_classes': own.num_classes}
        changed |= {name: value for name, value in given.items() if value not in (None, defaults[name])}
    parts = [f'{name}={"x".join(map(str, v)) if isinstance(v, tuple) else v}' for name, v in changed.items()]
    return config.model + (f' with {", ".join(parts)}' if parts else '')


class Reporter:
    """Prints on the main rank only. Without a terminal there is a line a minute instead of the bar."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        total_steps: int,
        steps_per_epoch: int,
        step: int,
        is_main: bool,
        task: Task,
        loggers: MetricLoggers,
    ) -> None:
        self.config, self.folder, self.is_main, self.task = config, folder, is_main, task
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.first_step, self.started = step, time.perf_counter()
        self.last_line = self.last_drawing = self.started
        self.bar: Any = None
        self.check: Callable[[], None] = lambda: None  # raises OSError when the folder is no longer ours to write to
        self.loggers = loggers
        self.loggers.say = self.say
        self.epochs_done = 0

    def say(self, text: str) -> None:
        if self.is_main:
            with contextlib.suppress(OSError):  # the log may lie on the disk that is full
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()

    def attempt(self, work: Callable[[], None]) -> None:
        """Do something on the main rank that the run can do without if the disk refuses it."""
        if not self.is_main:
            return
        try:
            self.check()
            work()
        except OSError as error:
            self.say(f'cannot write to {self.folder}: {error}')

    def seconds_left(self, step: int) -> float:
        done = max(step - self.first_step, 1)
        return (time.perf_counter() - self.started) / done * (self.total_steps - step)

    def start_epoch(self, epoch: int, first_step: int) -> None:
        if self.is_main and sys.stderr.isatty():
            name = f'epoch {epoch + 1}/{self.config.epochs}'
            self.bar = tqdm(total=self.steps_per_epoch, initial=first_step, desc=name, leave=False, dynamic_ncols=True)

    def step_done(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def interval(self, row: dict[str, Any]) -> None:
        """A logging interval has ended."""
        text = (
            f'loss {decimals(row["loss"])}, lr {row["lr"]:.2e}, {row["images_per_s"]:.0f} img/s, '
            f'data wait {row["data_wait"]:.0%}, left {duration(self.seconds_left(row["step"]))}'
        )
        now = time.perf_counter()
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
        elif now - self.last_line > _QUIET_SECONDS:
            self.last_line = now
            self.say(f'step {row["step"]}/{self.total_steps}: {text}')
        values = {name: row[name] for name in ('loss', 'lr', 'images_per_s', 'data_wait')}
        self.loggers.log('train', values, row['step'], row['epoch'])

    def end_epoch(self, history: list[dict[str, Any]]) -> None:
        """Write summary.csv anew and say how the epoch went."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        self.epochs_done = len(history)
        if not self.is_main:
            return
        row = history[-1]
        self.attempt(lambda: write_rows(self.folder / 'summary.csv', history))
        self.say(self._epoch_line(row))
        self.last_line = time.perf_counter()
        values = {name: value for name, value in row.items() if name not in ('epoch', 'step')}
        self.loggers.log('epoch', values, row['step'], row['epoch'])
        if time.perf_counter() - self.last_drawing > _QUIET_SECONDS:
            self.draw()

    def _epoch_line(self, row: dict[str, Any]) -> str:
        parts = [
            f'epoch {row["epoch"]:>3}/{self.config.epochs}',
            f'loss {decimals(row["train_loss"])}',
            f'lr {row["lr"]:.2e}',
        ]
        for shown in self.task.shown:
            if row.get(shown.metric) is not None:
                parts.append(f'{shown.label} {decimals(row[shown.metric], digits=shown.decimals)}')
        parts += [f'{row["images_per_s"]:.0f} img/s', f'data wait {row["data_wait"]:.0%}']
        parts.append(f'left {duration(self.seconds_left(row["step"]))}')
        return '  '.join(parts)

    def draw(self) -> None:
        if self.is_main and curves.available and (self.folder / 'summary.csv').is_file():
            self.last_drawing = time.perf_counter()
            files = self.folder / 'summary.csv', self.folder / 'curves.png'
            self.attempt(lambda: curves.draw_curves(*files, *self.task.curve))

    def close(self) -> None:
        self.draw()
        if self.bar is not None:
            self.bar.close()
        self.loggers.close(finished=self.epochs_done == self.config.epochs)
