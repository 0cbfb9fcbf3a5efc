"""Images as bytes up to the device, a quarter of what floats take, and normalized there.

A transform of timm ends with: bytes to floats, normalization, and perhaps rectangles erased by random numbers of the
sample's own. The workers stop before the floats and draw the rectangles only; the device does the rest, by the same
operations in the same order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import MaybeToTensor
from torchvision.transforms import Compose, Normalize
from torchvision.transforms.functional import pil_to_tensor


class Rectangle(NamedTuple):
    """What an erased part of a normalized image is filled with."""

    top: int
    left: int
    values: torch.Tensor  # C, h, w


class ByteImage(NamedTuple):
    pixels: torch.Tensor  # C, H, W, uint8
    erased: list[Rectangle]


class Normalization:
    """Of a batch of bytes (B, C, H, W), as torchvision's to_tensor and Normalize do it one by one."""

    def __init__(self, mean: Any, std: Any) -> None:
        self.mean, self.std = (torch.as_tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if self.mean.device != images.device:
            self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        return images.to(torch.float32).div_(255).sub_(self.mean).div_(self.std)


class ByteTransform:
    """The part of a transform for the workers.

    Args:
        transforms: From a PIL image to one that is as large as the input.
        erasing: timm's, or None.
    """

    def __init__(self, transforms: list[Callable[[Any], Any]], erasing: RandomErasing | None) -> None:
        self.transforms, self.erasing = transforms, erasing

    def __call__(self, image: Any) -> ByteImage:
        for part in self.transforms:
            image = part(image)
        pixels = pil_to_tensor(image)
        canvas = _Canvas(tuple(pixels.shape))
        if self.erasing is not None:
            self.erasing(canvas)
        return ByteImage(pixels, canvas.erased)


class _Canvas:
    """What timm's RandomErasing takes for an image, and which keeps what is painted on it."""

    dtype = torch.float32

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.erased: list[Rectangle] = []

    def size(self) -> tuple[int, ...]:
        return self.shape

    def __setitem__(self, where: tuple[slice, slice, slice], values: torch.Tensor) -> None:
        _, rows, columns = where
        channels, height, width = self.shape[0], rows.stop - rows.start, columns.stop - columns.start
        self.erased.append(Rectangle(rows.start, columns.start, values.expand(channels, height, width)))


def split_transform(transform: Any) -> tuple[ByteTransform, Normalization] | None:
    """The workers' part and the device's; None where a transform does not end as timm's do."""
    parts = list(transform.transforms) if isinstance(transform, Compose) else []
    erasing = parts.pop() if parts and isinstance(parts[-1], RandomErasing) else None
    if len(parts) < 2 or not (isinstance(parts[-2], MaybeToTensor) and isinstance(parts[-1], Normalize)):
        return None
    return ByteTransform(parts[:-2], erasing), Normalization(parts[-1].mean, parts[-1].std)
