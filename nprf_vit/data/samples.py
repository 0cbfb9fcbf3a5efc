"""Datasets whose samples depend on their key alone."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from ..errors import BadImage
from .order import Key
from .seeding import derive_seed, seeded
from .sources import ImageSource

Transform = Callable[[Any], torch.Tensor]
ATTEMPTS = 64  # with half of all images unreadable, one in 10^19 samples finds no stand-in


class TrainSamples(Dataset):
    """Augmented samples: the random numbers of (epoch, index, repeat) are drawn from that key and the seed.

    Each comes with a note, empty unless the image could not be read: then another image stands in for it, chosen by
    (seed, epoch, index), and the note has the index and the reason.
    """

    def __init__(self, source: ImageSource, transform: Transform, seed: int):
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, Any, str]:
        with seeded(derive_seed(self.seed, 'augment', *key)):
            try:
                image, target = self.source[key[1]]
                note = ''
            except BadImage as error:
                image, target = self._stand_in(key)
                note = f'{key[1]} {error}'
            return self.transform(image), target, note

    def _stand_in(self, key: Key) -> tuple[Any, Any]:
        for attempt in range(ATTEMPTS):
            with contextlib.suppress(BadImage):  # it gets its own note when its own turn comes
                return self.source[derive_seed(self.seed, 'stand-in', *key[:2], attempt) % len(self.source)]
        raise BadImage(f'{ATTEMPTS} images chosen at random from {self.source.name} cannot be read')


class EvalSamples(Dataset):
    """Samples with their index, by which evaluation proves that it saw each image once, and a note as in training.

    An image that cannot be read has no stand-in: a blank one holds its place until the evaluation refuses the note.
    """

    def __init__(self, source: ImageSource, transform: Transform):
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any, int, str]:
        try:
            image, target = self.source[index]
        except BadImage as error:
            return *self._blank(), index, f'{index} {error}'
        return self.transform(image), target, index, ''

    def _blank(self) -> tuple[torch.Tensor, Any]:
        source = self.source.dataset if isinstance(self.source, Subset) else self.source
        return source.blank(self.transform)


class SyntheticSamples(Dataset):
    """Noise with random labels, for `--dry-run`."""

    def __init__(self, input_size: tuple[int, int, int], num_classes: int, seed: int):
        self.input_size, self.num_classes, self.seed = input_size, num_classes, seed

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 'synthetic', *key))
        label = torch.randint(self.num_classes, (), generator=generator)
        return torch.randn(self.input_size, generator=generator), int(label)
