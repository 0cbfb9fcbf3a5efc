"""The likelihood of images, byte by byte: cross-entropy in training, bits per dimension in evaluation.

B batch, N bytes of an image, V levels.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from nprf_vit.config.schema import Config
from nprf_vit.data.datasets.pixels import PixelSource, SyntheticPixels, as_bytes, open_pixels
from nprf_vit.data.datasets.real_labels import RealLabels
from nprf_vit.data.datasets.registry import find_dataset
from nprf_vit.data.samples import Transform
from nprf_vit.data.split import Split
from nprf_vit.engine.output.numbers import decimals
from nprf_vit.engine.output.paper_results import paper_bits

from .base import Curve, PerImage, Shown, Sums, Task


class PixelLikelihood(Task):
    """Mean -log p of the bytes; evaluation has -log2 p of each image over its N bytes, and its standard error."""

    shown = (Shown('bits/dim', 'bpd', 4), Shown('EMA bits/dim', 'ema_bpd', 4))
    curve = Curve('bpd', 'bits/dim')

    @staticmethod
    def fits(model: nn.Module) -> bool:
        return hasattr(model, 'levels')

    @classmethod
    def build(cls, config: Config, model: nn.Module, real_labels: RealLabels | None = None) -> 'PixelLikelihood':
        return cls()

    @staticmethod
    def open_images(config: Config, split: Split) -> Any:
        return open_pixels(config, split)

    @staticmethod
    def build_transform(config: Config, model: nn.Module, source: PixelSource, training: bool) -> Transform:
        source.check(model.in_chans, model.img_size, model.levels)
        return as_bytes

    @staticmethod
    def synthetic_samples(config: Config, model: nn.Module) -> Dataset:
        return SyntheticPixels(model.in_chans, model.img_size, model.levels, config.seed)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._nats(logits, targets).mean()

    def measure(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor | None) -> Sums:
        bits = self._nats(logits, targets).double().mean(1) / math.log(2)  # B
        return {'bits': bits.sum(), 'bits_squared': bits.square().sum()}

    def per_image(self, logits: torch.Tensor, targets: torch.Tensor) -> PerImage:
        return PerImage(self._nats(logits, targets).mean(1) / math.log(2))

    def summarize(self, totals: dict[str, float], count: int) -> dict[str, float]:
        """The images are a sample: the error is the deviation of their bits over √count."""
        mean = totals['bits'] / count
        variance = max(0.0, totals['bits_squared'] - count * mean * mean) / max(1, count - 1)
        return {'bpd': mean, 'bpd_se': math.sqrt(variance / count), 'loss': mean * math.log(2)}

    def is_better(self, new: float, old: float) -> bool:
        return new < old

    @staticmethod
    def _nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """-log p of each byte: logits (B, N, V) and rasters of at least N bytes to (B, N)."""
        targets = targets[:, : logits.shape[1]].long()
        return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction='none')

    @staticmethod
    def results_table(config: Config, metrics: dict[str, Any]) -> str:
        """Bits per dimension with their standard error, under the name of the data they belong to."""
        first = max(34, len(f'{config.model} (EMA)') + 1)
        entry = find_dataset(config.dataset)
        title = config.dataset if entry is None else entry.title
        lines = [f'on {title}', f'{"":<{first}}{"bits/dim":>10}{"error":>10}{"images":>9}']
        for label, prefix in (('', ''), (' (EMA)', 'ema_')):
            if f'{prefix}bpd' in metrics:
                bits, error = metrics[f'{prefix}bpd'], metrics[f'{prefix}bpd_se']
                numbers = decimals(bits, 10) + decimals(error, 10)
                lines.append(f'{config.model + label:<{first}}{numbers}{metrics["images"]:>9}')
        paper = paper_bits(config.model, config.dataset)
        if paper:
            lines.append(f'the paper has {paper} on ImageNet32 and does not say which version; they are not comparable')
        return '\n'.join(lines)
