"""The tasks by name. A new one is a file beside this one, a line here and one in config/task_keys.py."""

from torch import nn

from nprf_vit.config.schema import Config
from nprf_vit.data.datasets.real_labels import RealLabels
from nprf_vit.errors import InputError

from .base import Task
from .classification import Classification
from .pixel import PixelLikelihood

TASKS: dict[str, type[Task]] = {'classification': Classification, 'pixel': PixelLikelihood}


def task_of(config: Config) -> type[Task]:
    return TASKS[config.task]


def build_task(config: Config, model: nn.Module, real_labels: RealLabels | None = None) -> Task:
    """The configuration's task, if the model is one for it."""
    task = task_of(config)
    if not task.fits(model):
        fit = next(name for name, other in TASKS.items() if other.fits(model))
        raise InputError(f'model {config.model} is for task {fit}, the configuration has task {config.task}')
    return task.build(config, model, real_labels)
