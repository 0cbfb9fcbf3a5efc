"""The size of an image after a transform, checked before it runs: a row of pixels can become gigabytes."""

from typing import Any

import torch
from timm.data.transforms import ResizeKeepRatio
from torchvision.transforms import Resize

from .byte_images import ByteImage
from .image_file import check_pixels
from .samples import Transform

_KINDS = (Resize, ResizeKeepRatio)


class BoundedTransform:
    """A transform that refuses images which it would enlarge beyond `max_pixels`.

    Resizing to a given shorter side keeps the ratio: 60000x1 pixels become 14,880,000x248.
    """

    def __init__(self, transform: Transform, max_pixels: int) -> None:
        self.transform, self.max_pixels = transform, max_pixels
        self.resizings = [part for part in getattr(transform, 'transforms', []) if isinstance(part, _KINDS)]

    def __call__(self, image: Any) -> torch.Tensor | ByteImage:
        for part in self.resizings:
            check_pixels(*resized(part, *image.size), self.max_pixels)
        return self.transform(image)


def resized(part: Resize | ResizeKeepRatio, width: int, height: int) -> tuple[int, int]:
    """The size that an image of this size gets, as torchvision and timm compute it."""
    if isinstance(part, ResizeKeepRatio):
        ratios = [height / part.size[0], width / part.size[1]]
        ratio = max(ratios) * part.longest + min(ratios) * (1 - part.longest)
        return round(width / ratio), round(height / ratio)
    sides = [part.size] if isinstance(part.size, int) else list(part.size)
    if len(sides) == 2:
        return sides[1], sides[0]
    short = min(width, height)
    return width * sides[0] // short, height * sides[0] // short
