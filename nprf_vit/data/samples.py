"""Datasets whose samples depend on their key alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from .order import Key
from .seeding import derive_seed, seeded
from .sources import ImageSource

Transform = Callable[[Any], torch.Tensor]


class TrainSamples(Dataset):
    """Augmented samples: the random numbers of (epoch, index, repeat) are drawn from that key and the seed."""

    def __init__(self, source: ImageSource, transform: Transform, seed: int):
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int]:
        with seeded(derive_seed(self.seed, 'augment', *key)):
            image, target = self.source[key[1]]
            return self.transform(image), target


class EvalSamples(Dataset):
    """Samples with their index, by which evaluation proves that it saw each image once."""

    def __init__(self, source: ImageSource, transform: Transform):
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        image, target = self.source[index]
        return self.transform(image), target, index


class SyntheticSamples(Dataset):
    """Noise with random labels, for `--dry-run`."""

    def __init__(self, input_size: tuple[int, int, int], num_classes: int, seed: int):
        self.input_size, self.num_classes, self.seed = input_size, num_classes, seed

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 'synthetic', *key))
        label = torch.randint(self.num_classes, (), generator=generator)
        return torch.randn(self.input_size, generator=generator), int(label)
