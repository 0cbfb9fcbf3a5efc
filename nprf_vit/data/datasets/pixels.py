"""Images as bytes for models of pixels: no augmentation, no normalization, the bytes themselves as targets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from nprf_vit.config.schema import Config
from nprf_vit.data.batch import Sample
from nprf_vit.data.sample_order import Key
from nprf_vit.data.seeding import derive_seed
from nprf_vit.data.split import Split
from nprf_vit.errors import InputError

from .registry import DatasetEntry, Location, find_dataset, names_of


class PixelSource(Dataset):
    """Images by index as (H, W, C) bytes, each with its raster, y then x then channel, as the target.

    Args:
        images: Anything with a shape (N, H, W, C) that gives (H, W, C) uint8 arrays by index.
        name: What error messages call it.
    """

    num_classes = None  # there are none to predict

    def __init__(self, images: Any, name: str) -> None:
        self.images, self.name = images, name

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, torch.Tensor]:
        image = np.ascontiguousarray(self.images[index])
        return image, torch.from_numpy(image.reshape(-1).copy())

    def blank(self, transform: Callable[[np.ndarray], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """What can be batched with the samples."""
        image = np.zeros(self.images.shape[1:], np.uint8)
        return transform(image), torch.from_numpy(image.reshape(-1).copy())

    def check(self, in_chans: int, img_size: tuple[int, int], levels: int) -> None:
        """Raise unless a model of this shape can take every image."""
        if tuple(self.images.shape[1:]) != (*img_size, in_chans):
            height, width, channels = self.images.shape[1:]
            raise InputError(
                f'{self.name} has images of {height}x{width} with {channels} channels, the model takes '
                f'{img_size[0]}x{img_size[1]} with {in_chans}: set img_size and in_chans'
            )
        if levels < 256 and isinstance(self.images, np.ndarray) and len(self) and self.images.max() >= levels:
            raise InputError(f'{self.name} has bytes up to {self.images.max()}, the model levels 0..{levels - 1}')


def as_bytes(image: np.ndarray) -> torch.Tensor:
    """(H, W, C) to (C, H, W), uint8."""
    return torch.from_numpy(image.transpose(2, 0, 1).copy())


def open_pixels(config: Config, split: Split) -> PixelSource:
    """A split ('train' or 'validation') of the configuration's dataset, its number of images checked."""
    name = config.dataset
    entry = find_dataset(name, 'pixel')
    if entry is None:
        raise InputError(f'no dataset {name!r} for the task pixel: expected one of {", ".join(names_of("pixel"))}')
    try:
        _check_location(entry, config.data_dir)
        images = entry.openers['pixel'](config, split)
    except OSError as error:
        raise InputError(f'cannot read {config.data_dir}: {error}') from error
    source = PixelSource(images, f'{entry.title}, {split},')
    expected = (config.train_images if split == 'train' else config.val_images) or entry.counts.get(split)
    if expected is not None and len(source) != expected:
        raise InputError(f'{source.name} has {len(source)} images: expected {expected}')
    if len(source) == 0:
        raise InputError(f'{source.name} holds no images')
    return source


def _check_location(entry: DatasetEntry, data_dir: str | None) -> None:
    is_file = entry.location is Location.FILE
    if not is_file and entry.location is not Location.FOLDER:
        return
    what = 'a file, --data-dir FILE.npz' if is_file else 'a folder, --data-dir DIR'
    if not data_dir:
        raise InputError(f'dataset {entry.name} needs {what}')
    path = Path(data_dir)
    if not (path.is_file() if is_file else path.is_dir()):
        raise InputError(f'{data_dir} does not exist: dataset {entry.name} needs {what}')


class SyntheticPixels(Dataset):
    """Random bytes, for `--dry-run`."""

    def __init__(self, in_chans: int, img_size: tuple[int, int], levels: int, seed: int) -> None:
        self.shape, self.levels, self.seed = (*img_size, in_chans), levels, seed

    def __getitem__(self, key: Key) -> Sample:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 'synthetic', *key))
        image = torch.randint(self.levels, self.shape, dtype=torch.uint8, generator=generator)
        return Sample(image.permute(2, 0, 1), image.flatten())
