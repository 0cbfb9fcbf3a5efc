"""How the relative position biases develop: `rel_pos_bias.jsonl`, a line for every few epochs.

K heads.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nprf_vit.layers import RelPosBias

from .line_log import LineLog

MOST_LINES = 50  # of a run: every epoch of a short one
_DIGITS = 5


class BiasLog(LineLog):
    """Lines with the mean bias of each head at each distance; a continuation drops those after its epochs."""

    def __init__(self, path: Path, epoch: int) -> None:
        super().__init__(path, epoch)

    def step_of(self, line: str) -> int | None:
        try:
            return int(json.loads(line)['epoch'])
        except (ValueError, KeyError, TypeError):
            return None

    def due(self, epoch: int, epochs: int) -> bool:
        return epoch % -(-epochs // MOST_LINES) == 0 or epoch == epochs

    def add(self, model: nn.Module, step: int, epoch: int) -> None:
        tables = {name: _profile(m) for name, m in model.named_modules() if isinstance(m, RelPosBias)}
        if tables:
            self.append(json.dumps({'epoch': epoch, 'step': step, 'tables': tables}) + '\n')


def _profile(bias: RelPosBias) -> dict[str, Any]:
    """Mean bias by distance: in rings on a grid; back in time, in ever wider steps, on a sequence."""
    table = bias.table.detach().float().cpu()
    if table.ndim == 2:
        table = table[:, : table.shape[1] // 2 + 1].flip(1)  # K, N: 0, 1, … back
        ring = torch.arange(table.shape[1]).add(1).log2().floor().long()
    else:
        axes = [torch.arange(size) - size // 2 for size in table.shape[1:]]
        ring = (axes[0][:, None].square() + axes[1].square()).float().sqrt().round().long().flatten()
    table = table.flatten(1)
    counts = torch.bincount(ring)
    sums = torch.zeros(len(table), len(counts)).index_add_(1, ring, table)
    kept = counts > 0
    distance = torch.arange(len(counts))[kept]
    if bias.table.ndim == 2:
        distance = 2**distance - 1
    means = [[float(f'{value:.{_DIGITS}g}') for value in head] for head in (sums[:, kept] / counts[kept]).tolist()]
    return {'distance': distance.tolist(), 'heads': means}
