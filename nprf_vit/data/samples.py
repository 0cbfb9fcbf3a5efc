"""Datasets whose samples depend on their key alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from nprf_vit.data.datasets.images import ImageSource

from ..errors import BadImage, RunError, first_line, printable
from .batch import FaultKind, Sample, SampleFault
from .byte_images import ByteImage
from .sample_order import Key
from .seeding import derive_seed, seeded

Transform = Callable[[Any], torch.Tensor | ByteImage]
ATTEMPTS = 64  # with half of all images unreadable, one in 10^19 samples finds no stand-in


class TrainSamples(Dataset):
    """Augmented samples: the random numbers of (epoch, index, repeat) are drawn from that key and the seed.

    Where an image cannot be read or its augmentation fails, another one stands in for it, chosen by
    (seed, epoch, index), and the sample has a fault with the index and the reason.
    """

    def __init__(self, source: Any, transform: Transform, seed: int) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, key: Key) -> Sample:
        fault, problem, failed = None, '', 0
        for index in self._candidates(key):
            # what failed might fail again with the same random numbers: each failed augmentation has others follow
            with seeded(derive_seed(self.seed, 'augment', *key, *([failed] if failed else []))):
                try:
                    image, target = self.source[index]
                    image = _apply(self.transform, image, self.source, index, 'cannot augment')
                    return Sample(image, target, fault=fault)
                except BadImage as error:
                    failed += isinstance(error, _FailedTransform)
                    problem = str(error)
                    fault = fault or _fault(index, error)  # a stand-in gets its own when its own turn comes
        what = 'read or augmented' if failed else 'read'
        raise RunError(
            f'{ATTEMPTS} images chosen at random from {self.source.name} cannot be {what}, the last: {problem}'
        )

    def _candidates(self, key: Key) -> Iterator[int]:
        """The image of a key, then its stand-ins."""
        epoch, index, _ = key
        yield index
        for attempt in range(ATTEMPTS):
            yield derive_seed(self.seed, 'stand-in', epoch, index, attempt) % len(self.source)


class EvalSamples(Dataset):
    """Samples with their index, by which evaluation proves that it saw each image once.

    An image that cannot be read has no stand-in: a blank one holds its place until the evaluation refuses the fault.
    """

    def __init__(self, source: Any, transform: Transform) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        try:
            image, target = self.source[index]
            return Sample(_apply(self.transform, image, self.source, index, 'cannot transform'), target, index)
        except BadImage as error:
            return Sample(*self._blank(), index, _fault(index, error))

    def _blank(self) -> tuple[torch.Tensor | ByteImage, Any]:
        source = self.source.dataset if isinstance(self.source, Subset) else self.source
        return source.blank(self.transform)


class _FailedTransform(BadImage):
    """An image that was read, and on which a transform raised."""


def _fault(index: int, error: BadImage) -> SampleFault:
    kind = FaultKind.UNAUGMENTED if isinstance(error, _FailedTransform) else FaultKind.UNREADABLE
    return SampleFault(index, str(error), kind)


def _apply(transform: Transform, image: Any, source: Any, index: int, what: str) -> torch.Tensor | ByteImage:
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

    def __init__(self, input_size: tuple[int, int, int], num_classes: int, seed: int) -> None:
        self.input_size, self.num_classes, self.seed = input_size, num_classes, seed

    def __getitem__(self, key: Key) -> Sample:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 'synthetic', *key))
        label = torch.randint(self.num_classes, (), generator=generator)
        return Sample(torch.randn(self.input_size, generator=generator), int(label))
