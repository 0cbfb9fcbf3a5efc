"""Where metrics go besides the CSV files, by the key `log`: TensorBoard, Weights & Biases, MLflow.

A new one is a class here, a line in LOGGERS and its name in config/schema.py.
"""

import importlib.util
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nprf_vit.config.schema import Config
from nprf_vit.errors import InputError, first_line

from .atomic_file import write_text

PROJECT = 'nprf_vit'  # unless the environment names another: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME
_RUNS = 'loggers.json'  # what the services call this run, so that a continuation goes on in it


class MetricLogger(ABC):
    """One service.

    Args:
        step: Where the run begins or continues.
        run_id: What the service called this run when it began; None at its beginning.
    """

    run_id: str | None = None

    @abstractmethod
    def __init__(self, config: Config, folder: Path, step: int, run_id: str | None) -> None: ...

    @abstractmethod
    def log(self, group: str, values: dict[str, float], step: int, epoch: int) -> None:
        """The numbers of a logging interval (group 'train') or of an epoch (group 'epoch')."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """The run has ended: at its last epoch, or before it."""


class TensorBoard(MetricLogger):
    """Event files in the folder of the run; epochs are counted by epoch."""

    def __init__(self, config: Config, folder: Path, step: int, run_id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder / 'tensorboard', purge_step=step)

    def log(self, group: str, values: dict[str, float], step: int, epoch: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f'{group}/{name}', value, step if group == 'train' else epoch)

    def close(self, finished: bool) -> None:
        self.writer.close()


class WeightsAndBiases(MetricLogger):
    """WANDB_MODE, WANDB_PROJECT and the other variables of wandb count; its files are in the folder of the run."""

    def __init__(self, config: Config, folder: Path, step: int, run_id: str | None) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get('WANDB_PROJECT', PROJECT),
            name=folder.resolve().name,
            dir=folder,
            config=config.to_dict(),
            id=run_id,
            resume='allow' if run_id else None,
            settings=wandb.Settings(console='off', silent=True),  # the bar and the lines stay as they are
        )
        self.run_id = self.run.id

    def log(self, group: str, values: dict[str, float], step: int, epoch: int) -> None:
        self.run.log({f'{group}/{name}': value for name, value in values.items()} | {'epoch': epoch}, step=step)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class MLflow(MetricLogger):
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME count."""

    def __init__(self, config: Config, folder: Path, step: int, run_id: str | None) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient()
        if run_id is not None:
            self.run_id = run_id
            self.client.update_run(run_id, status='RUNNING')
            return
        name = os.environ.get('MLFLOW_EXPERIMENT_NAME', PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self.client.create_run(experiment_id, run_name=folder.resolve().name)
        self.run_id = run.info.run_id
        self.client.log_batch(self.run_id, params=[Param(k, str(v)[:500]) for k, v in config.to_dict().items()])

    def log(self, group: str, values: dict[str, float], step: int, epoch: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(f'{group}/{name}', float(value), now, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run_id, 'FINISHED' if finished else 'KILLED')


@dataclass(frozen=True)
class LoggerEntry:
    package: str  # that it needs, which is also the name of the extra that installs it
    opener: type[MetricLogger]


LOGGERS = {
    'tensorboard': LoggerEntry('tensorboard', TensorBoard),
    'wandb': LoggerEntry('wandb', WeightsAndBiases),
    'mlflow': LoggerEntry('mlflow', MLflow),
}


def wanted_loggers(config: Config) -> list[str]:
    """The names that the configuration asks for, besides csv, which is always written."""
    names = dict.fromkeys([*(['tensorboard'] if config.tensorboard else []), *config.log])
    return [name for name in names if name in LOGGERS]


def check_loggers(config: Config) -> None:
    """Refuse, before anything is built, what is not installed."""
    for name in wanted_loggers(config):
        package = LOGGERS[name].package
        spec = importlib.util.find_spec(package)
        # a folder of that name, such as wandb makes where it runs, counts as a package without any content
        if spec is None or spec.origin is None:
            asked = 'tensorboard: true' if name == 'tensorboard' and config.tensorboard else f'log: {name}'
            raise InputError(f'{asked} needs the package {package}: install nprf_vit[{package}]')


class MetricLoggers:
    """All that a run logs to. One that fails on the way is told of once and left out: no run ends for it."""

    def __init__(self, loggers: dict[str, MetricLogger]) -> None:
        self.loggers = loggers
        self.say: Callable[[str], None] = lambda text: None

    def log(self, group: str, values: dict[str, Any], step: int, epoch: int) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        self._each(lambda logger: logger.log(group, known, step, epoch))

    def close(self, finished: bool) -> None:
        self._each(lambda logger: logger.close(finished))

    def _each(self, work: Callable[[MetricLogger], None]) -> None:
        for name, logger in list(self.loggers.items()):
            try:
                work(logger)
            except Exception as error:  # services raise anything
                del self.loggers[name]
                self.say(f'no more metrics go to {name}: {type(error).__name__}: {first_line(error)}')


def open_loggers(config: Config, folder: Path, step: int) -> MetricLoggers:
    """Begin, or at a step beyond 0 go on, in every service that the configuration names. Main rank."""
    path, runs = folder / _RUNS, {}
    if step and path.is_file():
        try:
            runs = dict(json.loads(path.read_text(encoding='utf-8')))
        except (OSError, ValueError, TypeError):
            runs = {}  # a run of its own in the service instead of its continuation
    opened: dict[str, MetricLogger] = {}
    for name in wanted_loggers(config):
        try:
            opened[name] = LOGGERS[name].opener(config, folder, step, runs.get(name))
        except Exception as error:  # not logged in, no such server: for a user to know at once
            raise InputError(f'log: cannot start {name}: {type(error).__name__}: {first_line(error)}') from error
    named = {name: logger.run_id for name, logger in opened.items() if logger.run_id is not None}
    if named:
        write_text(path, json.dumps(named) + '\n')
    return MetricLoggers(opened)
