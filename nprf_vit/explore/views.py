"""A view of the page: one model at one size, and what it makes of each image.

L layers, K heads, Q stored queries, H×W grid.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nprf_vit.errors import InputError
from nprf_vit.html_page.build import pack, picture_url

from .attention_rows import attention_rows, quantize
from .loading import Loaded
from .pictures import Picture, prepare

TOP = 5  # predictions shown


@dataclass(frozen=True)
class Grid:
    """Tokens of a view: some before the grid, then H×W of them; and of which the rows are stored."""

    size: tuple[int, int]
    prefix: tuple[str, ...] = ()
    stride: int = 1  # between stored queries

    @property
    def tokens(self) -> int:
        return len(self.prefix) + self.size[0] * self.size[1]

    def stored(self) -> tuple[list[int], list[int]]:
        """Rows and columns of the grid whose crossings are stored: every one, or a coarser grid of them."""
        rows, columns = (list(range(min(self.stride // 2, side - 1), side, self.stride)) for side in self.size)
        return rows, columns

    def queries(self) -> torch.Tensor:
        """Numbers of the stored tokens: those before the grid, then the crossings row by row."""
        rows, columns = self.stored()
        first = len(self.prefix)
        on_grid = [first + y * self.size[1] + x for y in rows for x in columns]
        return torch.tensor([*range(first), *on_grid])


def grid_of(model: nn.Module) -> Grid:
    size = tuple(model.patch_embed.grid_size)
    count = getattr(model, 'num_prefix_tokens', 0)
    names = ['class token'] if getattr(model, 'cls_token', None) is not None else []
    names += ['distillation token'] if getattr(model, 'dist_token', None) is not None else []
    names += [f'register {i + 1}' for i in range(count - len(names))]
    return Grid((size[0], size[1]), tuple(names))


def choose_strides(sizes: list[tuple[int, Grid]], budget: int) -> list[int]:
    """Strides of stored queries so that all rows together take about `budget` bytes; the largest are thinned first.

    Args:
        sizes: For each view and image, the number of its matrices L·K and its grid.
    """
    strides = [1] * len(sizes)

    def cost(i: int) -> int:
        matrices, grid = sizes[i]
        return matrices * len(dataclasses.replace(grid, stride=strides[i]).queries()) * grid.tokens

    while True:
        costs = [cost(i) for i in range(len(sizes))]
        coarser = [i for i in range(len(sizes)) if strides[i] < max(sizes[i][1].size)]
        if sum(costs) <= budget or not coarser:
            return strides
        most = max(costs[i] for i in coarser)
        for i in coarser:
            strides[i] += costs[i] == most  # views of one size stay alike


def matrices_of(model: nn.Module) -> int:
    """Layers times heads."""
    blocks = getattr(model, 'blocks', None)
    heads = [block.attn.num_heads for block in blocks if hasattr(block, 'attn')] if blocks is not None else []
    if not heads:
        raise InputError(f'{type(model).__name__} has no attention that can be shown: expected a ViT')
    return sum(heads)


def describe(grid: Grid, loaded: Loaded, model_index: int) -> dict[str, Any]:
    """The part of a view that all images share."""
    rows, columns = grid.stored()
    height, width = loaded.img_size
    return {
        'model': model_index,
        'title': f'{height}×{width} px, {grid.size[0]}×{grid.size[1]} {"pixels" if loaded.is_pixel else "patches"}',
        'grid': list(grid.size),
        'prefix': list(grid.prefix),
        'rows': rows,
        'columns': columns,
    }


def packed_rows(rows: torch.Tensor) -> dict[str, Any]:
    """Rows (L, K, Q, N) for the page."""
    packed = quantize(rows)
    scale = torch.stack([packed.low, packed.high], -1).numpy().astype('<f4')
    layers, heads = rows.shape[:2]
    return {'layers': layers, 'heads': heads, 'bytes': pack(packed.bytes.numpy()), 'scale': pack(scale)}


def view_of_image(loaded: Loaded, grid: Grid, picture: Picture, names: list[str]) -> dict[str, Any]:
    """What the model makes of an image: its rows, and its five likeliest classes."""
    tensor, shown = prepare(loaded, picture)
    output, rows = attention_rows(loaded.model, tensor, grid.queries())
    if rows.shape[-1] != grid.tokens:
        raise InputError(f'{loaded.title} has {rows.shape[-1]} tokens for a {grid.size[0]}x{grid.size[1]} grid')
    if isinstance(output, tuple):  # class and distillation heads
        output = torch.stack(output).mean(0)
    likely = output[0].float().softmax(-1).topk(min(TOP, output.shape[-1]))
    predictions = [
        {'label': names[i], 'p': round(p, 6), 'right': i == picture.target}
        for p, i in zip(likely.values.tolist(), likely.indices.tolist())
    ]
    target = None if picture.target is None else names[picture.target]
    return {'picture': picture_url(shown), 'predictions': predictions, 'target': target, **packed_rows(rows)}
