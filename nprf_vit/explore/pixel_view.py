"""A view of a model of pixels: how many bits each byte costs, where its prediction looks, and completions.

C colour channels, H×W pixels, N = H·W·C bytes. Token t holds byte t-1 and predicts byte t; token 0 is the start.
"""

import math
from typing import Any

import numpy as np
import torch

from nprf_vit.errors import InputError
from nprf_vit.html_page.build import picture_url
from nprf_vit.models.pixel import PixelTransformer, to_raster
from nprf_vit.sample import generate

from .attention_rows import attention_rows
from .views import Grid, packed_rows

COMPLETIONS = 4


def pixel_grid(model: PixelTransformer) -> Grid:
    total = math.prod(model.img_size) * model.in_chans
    if model.length != total:
        raise InputError(f'this model has {model.length} of the {total} bytes of an image: whole ones can be shown')
    return Grid(model.img_size, ('start',))


def pixel_view(model: PixelTransformer, grid: Grid, levels: torch.Tensor, seed: int = 0) -> dict[str, Any]:
    """What the model makes of an image of levels (C, H, W)."""
    channels, pixels = model.in_chans, math.prod(model.img_size)
    # the rows of each pixel's first byte; the start token's own would be that of the first
    queries = (grid.queries()[1:] - 1) * channels
    output, rows = attention_rows(model, levels[None], queries)
    raster = to_raster(levels[None])
    nats = torch.nn.functional.cross_entropy(output[0].double(), raster[0].long(), reduction='none')
    bits = (nats / math.log(2)).reshape(pixels, channels).mean(1)
    return {
        'picture': picture_url(_as_bytes(levels, model.levels)),
        'bits': [round(value, 4) for value in bits.tolist()],
        'completions': _completions(model, levels, seed),
        **packed_rows(_by_pixel(rows, channels)),
    }


def _by_pixel(rows: torch.Tensor, channels: int) -> torch.Tensor:
    """Weights (L, K, Q, N) of tokens as those of the start and of pixels, (L, K, Q', 1 + H·W); a row still sums to one.

    The last byte is no key: nothing comes after it. A first row stands for the start token, which sees itself only.
    """
    start, held = rows[..., :1], torch.nn.functional.pad(rows[..., 1:], (0, 1))  # bytes 0 … N-1
    out = torch.cat([start, held.unflatten(-1, (-1, channels)).sum(-1)], -1)
    first = torch.zeros_like(out[:, :, :1])
    first[..., 0] = 1
    return torch.cat([first, out], 2)


def _completions(model: PixelTransformer, levels: torch.Tensor, seed: int) -> list[str]:
    upper = to_raster(levels[None, :, : model.img_size[0] // 2]).repeat(COMPLETIONS, 1)
    drawn = generate(model, COMPLETIONS, seed=seed, known=upper)
    return [picture_url(_as_bytes(image, model.levels)) for image in drawn]


def _as_bytes(levels: torch.Tensor, count: int) -> np.ndarray:
    return (levels.double() * (255 / (count - 1))).round().to(torch.uint8).permute(1, 2, 0).numpy()
