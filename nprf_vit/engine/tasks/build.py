"""What a task reads: its images, how they become tensors, and what stands in for them in a dry run."""

from typing import Any

from torch import nn
from torch.utils.data import Dataset

from nprf_vit.config.schema import Config
from nprf_vit.data.datasets.images import open_source
from nprf_vit.data.datasets.pixels import SyntheticPixels, as_bytes, open_pixels
from nprf_vit.data.datasets.real_labels import RealLabels
from nprf_vit.data.resizing import BoundedTransform
from nprf_vit.data.samples import SyntheticSamples, Transform
from nprf_vit.data.transforms import eval_transform, train_transform
from nprf_vit.engine.model import input_size, normalization
from nprf_vit.errors import InputError

from .classification import Classification, Task
from .pixel import PixelLikelihood


def build_task(config: Config, model: nn.Module, real_labels: RealLabels | None = None) -> Task:
    """The configuration's task, if the model is one for it."""
    if (config.task == 'pixel') != hasattr(model, 'levels'):
        fit = 'pixel' if hasattr(model, 'levels') else 'classification'
        raise InputError(f'model {config.model} is for task {fit}, the configuration has task {config.task}')
    if config.task == 'pixel':
        return PixelLikelihood()
    return Classification(config, config.num_classes or model.num_classes, real_labels)


def open_images(config: Config, split: str) -> Any:
    """A split ('train' or 'validation') of the configuration's data."""
    return open_pixels(config, split) if config.task == 'pixel' else open_source(config, split)


def build_transform(config: Config, model: nn.Module, source: Any, training: bool) -> Transform:
    """From what the source gives to what the model takes."""
    if config.task == 'pixel':
        source.check(model.in_chans, model.img_size, model.levels)
        return as_bytes
    build = train_transform if training else eval_transform
    transform = build(config, input_size(config, model), *normalization(config, model))
    return BoundedTransform(transform, config.max_pixels)


def synthetic_samples(config: Config, model: nn.Module) -> Dataset:
    if config.task == 'pixel':
        return SyntheticPixels(model.in_chans, model.img_size, model.levels, config.seed)
    return SyntheticSamples(input_size(config, model), config.num_classes or model.num_classes, config.seed)
