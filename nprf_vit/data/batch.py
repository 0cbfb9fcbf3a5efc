"""What travels from a loader's workers to the loop: samples, batches of them, and what is wrong with some."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from .byte_images import ByteImage, Rectangle


class FaultKind(enum.Enum):
    UNREADABLE = 'unreadable'  # the image itself: the same file fails again
    UNAUGMENTED = 'unaugmented'  # its transform raised: with other random numbers it may not


@dataclass(frozen=True)
class SampleFault:
    """Why a sample is not the image of its index."""

    index: int
    problem: str
    kind: FaultKind


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor | ByteImage
    target: int | torch.Tensor
    index: int | None = None  # in evaluation, which counts by it
    fault: SampleFault | None = None


class Batch(NamedTuple):
    """B samples."""

    images: torch.Tensor  # B, C, H, W
    targets: torch.Tensor  # B, or B, N
    indices: torch.Tensor | None = None  # B, in evaluation; a stream has none
    faults: Sequence[SampleFault] = ()
    erased: Sequence[tuple[int, Rectangle]] = ()  # from images of bytes, by their place in the batch


def collate(samples: Sequence[Sample]) -> Batch:
    images, erased = _stack([sample.image for sample in samples])
    targets = default_collate([sample.target for sample in samples])
    indices = [sample.index for sample in samples if sample.index is not None]
    faults = [sample.fault for sample in samples if sample.fault is not None]
    return Batch(images, targets, torch.tensor(indices) if indices else None, faults, erased)


def collate_pairs(pairs: Sequence[tuple[torch.Tensor, Any]]) -> Batch:
    """A batch from a dataset that is not ours, whose samples are (image, target)."""
    images, erased = _stack([image for image, _ in pairs])
    return Batch(images, default_collate([target for _, target in pairs]), erased=erased)


def _stack(images: Sequence[torch.Tensor | ByteImage]) -> tuple[torch.Tensor, list[tuple[int, Rectangle]]]:
    pixels = [image.pixels if isinstance(image, ByteImage) else image for image in images]
    erased = [(i, part) for i, image in enumerate(images) if isinstance(image, ByteImage) for part in image.erased]
    return default_collate(pixels), erased
