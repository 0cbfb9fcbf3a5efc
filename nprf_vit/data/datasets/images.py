"""From a dataset's name to images: random access to (PIL image, class), or a stream of them."""

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from timm.data.dataset import ImageDataset, IterableImageDataset
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torch.utils.data import Dataset

from nprf_vit.config.schema import Config
from nprf_vit.data.image_file import check_regular, decode, reading, to_mode
from nprf_vit.data.split import Split
from nprf_vit.errors import InputError

from .registry import Location, find_dataset, names_of

MAX_PIXELS = 89_478_485  # PIL's own limit


class ImageSource(Dataset):
    """Any indexed dataset as (PIL image in the wanted mode, class)."""

    def __init__(self, dataset: Any, mode: str, name: str, max_pixels: int = MAX_PIXELS) -> None:
        self.dataset, self.mode, self.name, self.max_pixels = dataset, mode, name, max_pixels

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Raises BadImage for one that cannot be read; timm's own datasets give its neighbour instead."""
        with reading(lambda: self.describe(index)):
            if not isinstance(self.dataset, ImageDataset):
                image, target = self.dataset[index]
                return to_mode(image, self.mode), int(target)
            reader = self.dataset.reader
            if isinstance(reader, ReaderImageFolder):
                check_regular(reader.samples[index][0])
            stream, target = reader[index][:2]
            with stream:
                return decode(stream, self.mode, self.max_pixels), int(target)

    def blank(self, transform: Callable[[Image.Image], torch.Tensor]) -> tuple[torch.Tensor, int]:
        """What can be batched with the samples."""
        return transform(Image.new(self.mode, (8, 8))), 0

    def describe(self, index: int) -> str:
        """What messages call an image: its file, where it has one."""
        try:
            return f'image {index} of {self.name}, {self.filename(index)}'
        except (OSError, ValueError, KeyError, AttributeError, SyntaxError):  # some readers open the image for its name
            return f'image {index} of {self.name}'

    def filename(self, index: int) -> str:
        if not isinstance(self.dataset, ImageDataset):
            return f'{self.name}[{index}]'
        return self.dataset.filename(index, absolute=True)

    @property
    def class_names(self) -> list[str] | None:
        """What the dataset calls its classes, by their numbers, or None if it does not say."""
        reader = getattr(self.dataset, 'reader', None)
        for classes in (getattr(reader, 'class_to_idx', None), getattr(self.dataset, 'classes', None)):
            if classes:
                ordered = sorted(classes, key=classes.__getitem__) if isinstance(classes, dict) else classes
                return [str(name) for name in ordered]
        return None

    @property
    def num_classes(self) -> int | None:
        """How many classes the dataset has, or None if it does not say."""
        names = self.class_names
        return None if names is None else len(names)


def open_source(config: Config, split: Split) -> ImageSource | IterableImageDataset:
    """Open a split ('train' or 'validation' by the config's names) and check its classes and its size."""
    training = split == 'train'
    name = config.dataset
    entry = find_dataset(name, 'classification')
    if entry is None:
        names = names_of('classification')
        whole = [each for each in names if each and not each.endswith('/')]
        begins = [each for each in names if each.endswith('/')]
        raise InputError(
            f'unknown dataset {name}: expected {", ".join(whole)}, a name that begins with {", ".join(begins)}, or '
            'none for an image folder'
        )
    if entry.location is Location.FOLDER and not config.data_dir:
        what = f'dataset {name}' if name else 'an image folder'
        raise InputError(f'{what} needs a data folder: give --data-dir DIR')
    dataset = entry.openers['classification'](config, split)
    if isinstance(dataset, IterableImageDataset):
        return dataset
    mode = 'L' if config.in_chans == 1 else 'RGB'
    split_name = config.train_split if training else config.val_split
    source = ImageSource(dataset, mode, f'{name or config.data_dir} {split_name}', config.max_pixels)
    _check_counts(source, config, training)
    return source


def _check_counts(source: ImageSource, config: Config, training: bool) -> None:
    classes = source.num_classes
    if config.num_classes is not None and classes is not None and classes != config.num_classes:
        raise InputError(f'{source.name} has {classes} classes, the configuration num_classes {config.num_classes}')
    expected = config.train_images if training else config.val_images
    if expected is not None and len(source) != expected:
        key = 'train_images' if training else 'val_images'
        raise InputError(f'{source.name} has {len(source)} images, the configuration expects {key} {expected}')
    if len(source) == 0:
        raise InputError(f'{source.name} holds no images')
