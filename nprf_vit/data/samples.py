"""Datasets whose samples depend on their key alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from nprf_vit.data.datasets.images import ImageSource

from ..errors import BadImage, RunError, first_line, printable
from .sample_order import Key
from .seeding import derive_seed, seeded

Transform = Callable[[Any], torch.Tensor]
ATTEMPTS = 64  # with half of all images unreadable, one in 10^19 samples finds no stand-in
_UNAUGMENTED = 'cannot augment'


def is_augmentation(problem: str) -> bool:
    """Whether a note, without its index, tells of a failed augmentation and not of an unreadable image."""
    return problem.startswith(_UNAUGMENTED)


class TrainSamples(Dataset):
    """Augmented samples: the random numbers of (epoch, index, repeat) are drawn from that key and the seed.

    Each comes with a note, empty unless the image could not be read or its augmentation failed: then another image
    stands in for it, chosen by (seed, epoch, index), and the note has the index and the reason.
    """

    def __init__(self, source: ImageSource, transform: Transform, seed: int):
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, Any, str]:
        note, problem, failed = '', '', 0
        for index in self._candidates(key):
            # what failed might fail again with the same random numbers: each failed augmentation has others follow
            with seeded(derive_seed(self.seed, 'augment', *key, *([failed] if failed else []))):
                try:
                    image, target = self.source[index]
                    return _apply(self.transform, image, self.source, index, _UNAUGMENTED), target, note
                except _FailedTransform as error:
                    failed += 1
                    problem = str(error)
                except BadImage as error:
                    problem = str(error)
                note = note or f'{index} {problem}'  # a stand-in gets its own note when its own turn comes
        what = 'read or augmented' if failed else 'read'
        raise RunError(
            f'{ATTEMPTS} images chosen at random from {self.source.name} cannot be {what}, the last: {problem}'
        )

    def _candidates(self, key: Key) -> Iterator[int]:
        """The image of a key, then its stand-ins."""
        yield key[1]
        for attempt in range(ATTEMPTS):
            yield derive_seed(self.seed, 'stand-in', *key[:2], attempt) % len(self.source)


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
            return _apply(self.transform, image, self.source, index, 'cannot transform'), target, index, ''
        except BadImage as error:
            return *self._blank(), index, f'{index} {error}'

    def _blank(self) -> tuple[torch.Tensor, Any]:
        source = self.source.dataset if isinstance(self.source, Subset) else self.source
        return source.blank(self.transform)


class _FailedTransform(BadImage):
    """An image that was read, and on which a transform raised."""


def _apply(transform: Transform, image: Any, source: Any, index: int, what: str) -> torch.Tensor:
    """Turn whatever a transform raises into a bad image with its name: one of 10^8 must not end a run."""
    try:
        return transform(image)
    except Exception as error:
        if isinstance(source, Subset):
            source, index = source.dataset, source.indices[index]
        name = source.describe(index) if isinstance(source, ImageSource) else f'image {index} of {source.name}'
        if isinstance(error, BadImage):  # what would come of it is too large: no random number's fault
            raise BadImage(printable(f'cannot read {name}: {error}')) from error
        reason = f'{type(error).__name__}: {first_line(error)}'
        raise _FailedTransform(printable(f'{what} {name}: {reason}')) from error


class SyntheticSamples(Dataset):
    """Noise with random labels, for `--dry-run`."""

    def __init__(self, input_size: tuple[int, int, int], num_classes: int, seed: int):
        self.input_size, self.num_classes, self.seed = input_size, num_classes, seed

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 'synthetic', *key))
        label = torch.randint(self.num_classes, (), generator=generator)
        return torch.randn(self.input_size, generator=generator), int(label)
