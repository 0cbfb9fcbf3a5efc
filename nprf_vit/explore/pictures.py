"""The images of a page: files that the user names, or a few of the checkpoint's own validation data."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo
from timm.data.dataset import IterableImageDataset

from nprf_vit.config.schema import Config
from nprf_vit.data.datasets.registry import Location, find_dataset
from nprf_vit.data.image_file import decode, reading
from nprf_vit.data.transforms import mean_and_std
from nprf_vit.engine.tasks.registry import task_of
from nprf_vit.errors import InputError

from .loading import Loaded

IMAGENET = 1000  # classes, whose names timm has


@dataclass
class Picture:
    """An image as it comes from its file or data set, and its class where it is known."""

    name: str
    content: Any  # a PIL image; for a model of pixels, levels (C, H, W)
    target: int | None = None


def read_pictures(paths: list[str], config: Config) -> list[Picture]:
    return [Picture(Path(path).name, _read(path, config)) for path in paths]


def _read(path: str, config: Config) -> Image.Image:
    if not Path(path).is_file():
        raise InputError(f'no image file {path}')
    with reading(lambda: f'the image {path}'), open(path, 'rb') as stream:
        return decode(stream, 'L' if config.in_chans == 1 else 'RGB', config.max_pixels)


def pictures_of_data(config: Config, count: int) -> list[Picture]:
    """Images at even distances of the validation split, since folders are sorted by class."""
    source = _open(config)
    if source is None or isinstance(source, IterableImageDataset):
        raise InputError('no images: give --image FILE ..., or --data-dir with the data of the checkpoint')
    count = min(count, len(source))
    found = []
    for i in range(count):
        index = (2 * i + 1) * len(source) // (2 * count)
        content, target = source[index]
        if config.task == 'pixel':
            content, target = torch.from_numpy(np.array(content)).permute(2, 0, 1).long(), None
        found.append(Picture(f'{source.name.strip(", ")} {index}', content, target))
    return found


def _open(config: Config) -> Any:
    """The validation split; None where the configuration does not know its data, and a reason where it is missing."""
    entry = find_dataset(config.dataset, config.task)
    if entry is None or (entry.location in (Location.FOLDER, Location.FILE) and not config.data_dir):
        return None
    try:
        return task_of(config).open_images(config, 'validation')
    except InputError as error:
        raise InputError(f'{error}; or give --image FILE ...') from None


def class_names(config: Config, num_classes: int) -> list[str]:
    """The names of classes: of data that is at hand, of ImageNet, else numbers."""
    entry = find_dataset(config.dataset, config.task)
    at_hand = entry is not None and (entry.location is Location.BUNDLED or config.data_dir)
    source = None
    with contextlib.suppress(InputError):  # a page with numbers for names is better than none
        source = _open(config) if at_hand else None
    names = getattr(source, 'class_names', None)
    if names and len(names) == num_classes:
        return names
    if num_classes == IMAGENET:
        info = ImageNetInfo()
        return [info.index_to_description(i).split(',')[0] for i in range(num_classes)]
    return [f'class {i}' for i in range(num_classes)]


def prepare(loaded: Loaded, picture: Picture) -> tuple[torch.Tensor, np.ndarray]:
    """What the model takes, (1, C, H, W), and the same as people see it, (H, W, C) uint8."""
    config, model = loaded.config, loaded.model
    image: Image.Image = picture.content
    tensor = task_of(config).build_transform(config, model, None, training=False)(image)
    assert isinstance(tensor, torch.Tensor)
    mean, std = (torch.tensor(values)[:, None, None] for values in mean_and_std(config, model))
    shown = ((tensor * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)
    return tensor[None], shown.permute(1, 2, 0).numpy()
