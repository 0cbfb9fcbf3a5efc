"""All names that the key `dataset` takes, one entry each: its title, where the data is, which tasks take it.

A new dataset is one entry here and a test.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nprf_vit.config.schema import Config
from nprf_vit.data.split import Split

from .arrays import read_arrays
from .cifar10 import open_cifar10
from .digits import Digits
from .folder import open_folder
from .imagenet32 import BatchImages, PngImages
from .timm_readers import open_by_name

Opener = Callable[[Config, Split], Any]


class Location(enum.Enum):
    """Where the data is."""

    BUNDLED = 'in a package'
    CACHE = 'where its library keeps it'
    FOLDER = 'in the folder --data-dir'
    FILE = 'in the file --data-dir'


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset.

    Args:
        name: As the key `dataset` has it; with a slash at its end, the beginning of the names.
        title: What reports and messages call it.
        openers: By the name of the task. For classification, indexed (image, class) pairs or a
            dataset of timm; for pixels, something of shape (N, H, W, C) with uint8 images by index.
        counts: How many images were published, by split; fewer are an incomplete copy.
    """

    name: str
    title: str
    location: Location
    openers: dict[str, Opener]
    counts: dict[str, int] = field(default_factory=dict)

    def matches(self, name: str) -> bool:
        return name.startswith(self.name) if self.name.endswith('/') else name == self.name


def _split(config: Config, split: Split) -> str:
    return config.train_split if split == 'train' else config.val_split


def _mode(config: Config) -> str:
    return 'L' if config.in_chans == 1 else 'RGB'


def _data_dir(config: Config) -> str:
    assert config.data_dir is not None, 'checked by whoever knows the location'
    return config.data_dir


def _folder(config: Config, split: Split) -> Any:
    return open_folder(_data_dir(config), _split(config, split), _mode(config))


def _by_name(own_cache: bool) -> Opener:
    return lambda config, split: open_by_name(config, _split(config, split), _mode(config), split == 'train', own_cache)


DATASETS = (
    DatasetEntry('', 'image folder', Location.FOLDER, {'classification': _folder}),
    DatasetEntry(
        'imagenet32_chrabaszcz',
        'ImageNet32 (Chrabaszcz et al. 2017)',
        Location.FOLDER,
        {'pixel': lambda config, split: BatchImages(Path(_data_dir(config)), split)},
        {'train': 1_281_167, 'validation': 50_000},
    ),
    DatasetEntry(
        'imagenet32_vandenoord',
        'ImageNet32 (van den Oord et al. 2016)',
        Location.FOLDER,
        {'pixel': lambda config, split: PngImages(Path(_data_dir(config)), split)},
        {'train': 1_281_149, 'validation': 49_999},
    ),
    DatasetEntry(
        'arrays',
        'array file',
        Location.FILE,
        {'pixel': lambda config, split: read_arrays(Path(_data_dir(config)), split)},
    ),
    DatasetEntry(
        'digits',
        'digits (scikit-learn, 8x8, 17 levels)',
        Location.BUNDLED,
        {
            'classification': lambda config, split: Digits(_split(config, split)),
            'pixel': lambda config, split: Digits(split).levels[..., None],
        },
    ),
    DatasetEntry(
        'torch/cifar10',
        'CIFAR-10',
        Location.FOLDER,
        {
            'classification': lambda config, split: open_cifar10(config, _split(config, split)),
            'pixel': lambda config, split: open_cifar10(config, _split(config, split)).images,
        },
        {'train': 50_000, 'validation': 10_000},
    ),
    DatasetEntry('torch/', 'torchvision', Location.FOLDER, {'classification': _by_name(False)}),
    DatasetEntry('hfds/', 'Hugging Face datasets', Location.CACHE, {'classification': _by_name(True)}),
    DatasetEntry('hfids/', 'Hugging Face datasets, streamed', Location.CACHE, {'classification': _by_name(True)}),
    DatasetEntry('tfds/', 'TensorFlow datasets', Location.CACHE, {'classification': _by_name(True)}),
    DatasetEntry('wds/', 'WebDataset', Location.FOLDER, {'classification': _by_name(False)}),
)


def find_dataset(name: str, task: str | None = None) -> DatasetEntry | None:
    """The entry of a name, if there is one and the task can learn from it."""
    found = (entry for entry in DATASETS if entry.matches(name) and (task is None or task in entry.openers))
    return next(found, None)


def names_of(task: str) -> list[str]:
    """The names, and beginnings of names, that a task takes."""
    return [entry.name for entry in DATASETS if task in entry.openers]


def published_count(dataset: str, split: Split) -> int | None:
    """How many images a dataset was published with; None if unknown."""
    entry = find_dataset(dataset)
    return None if entry is None else entry.counts.get(split)
