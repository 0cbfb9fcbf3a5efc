"""The learned relative position biases of a model, for the page."""

from typing import Any

import torch
from torch import nn

from nprf_vit.html_page.build import pack
from nprf_vit.layers import RelPosBias
from nprf_vit.models.pixel import PixelTransformer


def biases_of(model: nn.Module) -> list[dict[str, Any]]:
    """Each table of a model: heads, sizes and values, and the constant beyond them where there is one."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, RelPosBias):
            table = module.table.detach().float()
            fold = 0
            if table.ndim == 2:  # a sequence: what lies ahead is never read
                table, fold = _fold(table, model)
            entry: dict[str, Any] = {
                'title': _title(name),
                'shape': list(table.shape),
                'values': pack(table.numpy().astype('<f4')),
                'past': fold,
            }
            if module.far is not None:
                entry['far'] = [round(value, 6) for value in module.beyond().detach().tolist()]
            found.append(entry)
    return found


def _title(name: str) -> str:
    parts = name.split('.')
    numbers = [part for part in parts if part.isdecimal()]
    return f'layer {int(numbers[0]) + 1}' if numbers else 'all layers'


def _fold(table: torch.Tensor, model: nn.Module) -> tuple[torch.Tensor, int]:
    """Offsets 0, -1, … of a table (K, 2N-1) as rows of one image row each, (K, H, W·C), and the length of a row."""
    past = table[:, : table.shape[1] // 2 + 1].flip(1)  # K, N: 0, 1, … back
    width = model.img_size[1] * model.in_chans if isinstance(model, PixelTransformer) else past.shape[1]
    short = -past.shape[1] % width
    past = torch.cat([past, past[:, -1:].expand(-1, short)], 1)
    return past.unflatten(1, (-1, width)), width
