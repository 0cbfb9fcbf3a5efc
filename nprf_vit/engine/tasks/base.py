"""What is learned and what is measured. A task is all the loop and the evaluation know of either."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from nprf_vit.config.schema import Config
from nprf_vit.data.datasets.real_labels import RealLabels
from nprf_vit.data.samples import Transform
from nprf_vit.data.split import Split

Sums = dict[str, torch.Tensor]


class Shown(NamedTuple):
    """A metric in the line of an epoch."""

    label: str
    metric: str
    decimals: int


class Curve(NamedTuple):
    """What curves.png shows beside the losses."""

    metric: str  # and those whose names end in it: of the moving average, of other labels
    label: str


class PerImage(NamedTuple):
    """How well each image of a batch is done, on the device; None where a task has no classes."""

    loss: torch.Tensor  # B
    target: torch.Tensor | None = None  # B
    predicted: torch.Tensor | None = None  # B
    p: torch.Tensor | None = None  # B: of the predicted class


class Task(ABC):
    """One per name of the key `task`, in nprf_vit/engine/tasks/registry.py.

    The class knows the data; its instances know the loss and the metrics of one run.
    """

    shown: ClassVar[tuple[Shown, ...]]
    curve: ClassVar[Curve]
    smallest_batch: ClassVar[int] = 1  # that an update can be tried with

    @staticmethod
    @abstractmethod
    def fits(model: nn.Module) -> bool:
        """Whether a model is one for this task."""

    @classmethod
    @abstractmethod
    def build(cls, config: Config, model: nn.Module, real_labels: RealLabels | None = None) -> 'Task':
        """The task of a run."""

    @staticmethod
    @abstractmethod
    def open_images(config: Config, split: Split) -> Any:
        """A split ('train' or 'validation') of the configuration's data."""

    @staticmethod
    @abstractmethod
    def build_transform(config: Config, model: nn.Module, source: Any, training: bool) -> Transform:
        """From what the source gives to what the model takes."""

    @staticmethod
    @abstractmethod
    def synthetic_samples(config: Config, model: nn.Module) -> Dataset:
        """What stands in for the data in a dry run."""

    @staticmethod
    @abstractmethod
    def results_table(config: Config, metrics: dict[str, Any]) -> str:
        """One table: the model, its moving average, and the paper's number."""

    def defer_to_device(self, transform: Transform) -> Transform:
        """The part of a transform for the loader's workers, where `prepare` can do the rest on the device."""
        return transform

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """On the device, what `defer_to_device` left out."""
        return images

    def mix(
        self, images: torch.Tensor, targets: torch.Tensor, step: int, epoch: int, first_slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A micro-batch that starts at `first_slot` of its global batch, mixed; images may change in place."""
        return images, targets

    @abstractmethod
    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean training loss of a micro-batch."""

    @abstractmethod
    def measure(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor | None) -> Sums:
        """Evaluation sums of a batch."""

    def per_image(self, logits: torch.Tensor, targets: torch.Tensor) -> PerImage | None:
        """For the report's hardest images; None if there is nothing to tell."""
        return None

    @abstractmethod
    def summarize(self, totals: dict[str, float], count: int) -> dict[str, float]:
        """Metrics from the sums over all `count` images."""

    @abstractmethod
    def is_better(self, new: float, old: float) -> bool:
        """By the configuration's eval_metric."""
