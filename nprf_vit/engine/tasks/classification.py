"""The class of an image: top-1, top-5, ReaL labels."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn
from torch.utils.data import Dataset

from nprf_vit.config.schema import Config
from nprf_vit.data.byte_images import Normalization, split_transform
from nprf_vit.data.datasets.images import open_source
from nprf_vit.data.datasets.real_labels import RealLabels
from nprf_vit.data.mixup import BlockMixup
from nprf_vit.data.resizing import BoundedTransform
from nprf_vit.data.samples import SyntheticSamples, Transform
from nprf_vit.data.split import Split
from nprf_vit.data.transforms import eval_transform, mean_and_std, model_input_size, train_transform
from nprf_vit.engine.output.numbers import decimals
from nprf_vit.engine.output.paper_results import paper_row

from .base import Curve, PerImage, Shown, Sums, Task


class Classification(Task):
    """Cross-entropy with label smoothing and block-wise mixing; top-1, top-5 and plain cross-entropy."""

    shown = (Shown('top-1', 'top1', 2), Shown('top-5', 'top5', 2), Shown('EMA top-1', 'ema_top1', 2))
    curve = Curve('top1', 'top-1, %')
    smallest_batch = 2  # pairs are mixed, and batch norm takes no single image

    def __init__(self, config: Config, num_classes: int, real_labels: RealLabels | None = None) -> None:
        self.config, self.num_classes, self.real_labels = config, num_classes, real_labels
        self.normalize: Normalization | None = None  # where the workers leave it to the device
        self.mixup = None
        if config.mixes:
            self.mixup = BlockMixup(
                config.mixup_block,
                config.seed,
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
                prob=config.mixup_prob,
                switch_prob=config.mixup_switch_prob,
                mode=config.mixup_mode,
                label_smoothing=config.smoothing,
                num_classes=num_classes,
            )
            self._loss: Any = SoftTargetCrossEntropy()
        elif config.smoothing:
            self._loss = LabelSmoothingCrossEntropy(config.smoothing)
        else:
            self._loss = F.cross_entropy

    @staticmethod
    def fits(model: nn.Module) -> bool:
        return not hasattr(model, 'levels')

    @classmethod
    def build(cls, config: Config, model: nn.Module, real_labels: RealLabels | None = None) -> 'Classification':
        return cls(config, config.num_classes or model.num_classes, real_labels)

    @staticmethod
    def open_images(config: Config, split: Split) -> Any:
        return open_source(config, split)

    @staticmethod
    def build_transform(config: Config, model: nn.Module, source: Any, training: bool) -> Transform:
        build = train_transform if training else eval_transform
        transform = build(config, model_input_size(config, model), *mean_and_std(config, model))
        return BoundedTransform(transform, config.max_pixels)

    def defer_to_device(self, transform: Transform) -> Transform:
        assert isinstance(transform, BoundedTransform)
        parts = split_transform(transform.transform)
        if parts is None:
            return transform
        on_host, self.normalize = parts
        return BoundedTransform(on_host, transform.max_pixels)

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        return images if self.normalize is None or images.dtype != torch.uint8 else self.normalize(images)

    @staticmethod
    def synthetic_samples(config: Config, model: nn.Module) -> Dataset:
        return SyntheticSamples(model_input_size(config, model), config.num_classes or model.num_classes, config.seed)

    def mix(
        self, images: torch.Tensor, targets: torch.Tensor, step: int, epoch: int, first_slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.mixup is None:
            return images, targets
        off = self.config.mixup_off_epoch
        return self.mixup(images, targets, step, first_slot, enabled=not off or epoch < off)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(logits.float(), targets)

    def measure(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor | None) -> Sums:
        logits = logits.float()
        losses = F.cross_entropy(logits, targets, reduction='none')
        ranked = logits.topk(min(5, logits.shape[-1])).indices  # B, 5
        hits = ranked == targets[:, None]
        sums = {'loss': losses.double().sum(), 'top1': hits[:, :1].double().sum(), 'top5': hits.double().sum()}
        if self.real_labels is not None and indices is not None:
            sums |= self.real_labels.measure(ranked, indices)
        return sums

    def per_image(self, logits: torch.Tensor, targets: torch.Tensor) -> PerImage:
        logits = logits.float()
        p, predicted = logits.softmax(-1).max(-1)
        return PerImage(F.cross_entropy(logits, targets, reduction='none'), targets, predicted, p)

    def summarize(self, totals: dict[str, float], count: int) -> dict[str, float]:
        metrics = {
            'top1': 100 * totals['top1'] / count,
            'top5': 100 * totals['top5'] / count,
            'loss': totals['loss'] / count,
        }
        if 'real_images' in totals:
            for k in ('real_top1', 'real_top5'):
                metrics[k] = 100 * totals[k] / totals['real_images']
            metrics['real_images'] = int(totals['real_images'])
        return metrics

    def is_better(self, new: float, old: float) -> bool:
        return new < old if self.config.eval_metric.endswith('loss') else new > old

    @staticmethod
    def results_table(config: Config, metrics: dict[str, Any]) -> str:
        """The model, its EMA, ReaL labels where measured, and the paper's row."""
        first = max(26, len(f'{config.model} (EMA)') + 1)
        lines = [f'{"":<{first}}{"top-1":>8}{"top-5":>8}{"loss":>10}{"images":>9}']
        for label, prefix in (('', ''), (' (EMA)', 'ema_')):
            if f'{prefix}top1' in metrics:
                top1, top5, loss = (metrics[prefix + name] for name in ('top1', 'top5', 'loss'))
                scores = f'{top1:>8.2f}{top5:>8.2f}{decimals(loss, 10)}'
                lines.append(f'{config.model + label:<{first}}{scores}{metrics["images"]:>9}')
            if f'{prefix}real_top1' in metrics:
                top1, top5, images = (metrics[prefix + name] for name in ('real_top1', 'real_top5', 'real_images'))
                lines.append(f'{"ReaL labels" + label:<{first}}{top1:>8.2f}{top5:>8.2f}{"":>10}{images:>9}')
        paper = paper_row(config.model, config.num_classes)
        if paper:
            lines.append(f'{"paper, ImageNet-1K":<{first}}{paper[0]:>8.1f}{paper[1]:>8.1f}  {paper[2]}')
        return '\n'.join(lines)
