"""What is learned and what is measured. A task is all the loop and the evaluation know of either."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from nprf_vit.config.schema import Config
from nprf_vit.data.datasets.real_labels import RealLabels
from nprf_vit.data.mixup import BlockMixup

Sums = dict[str, torch.Tensor]


class Task(Protocol):
    """The mean training loss of a micro-batch; evaluation sums of a batch, and metrics from their totals."""

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...

    def mix(
        self, images: torch.Tensor, targets: torch.Tensor, step: int, epoch: int, first_slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def measure(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor | None) -> Sums: ...

    def summarize(self, totals: dict[str, float], count: int) -> dict[str, float]: ...

    def is_better(self, new: float, old: float) -> bool: ...


class Classification:
    """Cross-entropy with label smoothing and block-wise mixing; top-1, top-5 and plain cross-entropy."""

    def __init__(self, config: Config, num_classes: int, real_labels: RealLabels | None = None):
        self.config, self.num_classes, self.real_labels = config, num_classes, real_labels
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

    def mix(self, images, targets, step, epoch, first_slot):
        if self.mixup is None:
            return images, targets
        off = self.config.mixup_off_epoch
        return self.mixup(images, targets, step, first_slot, enabled=not off or epoch < off)

    def loss(self, logits, targets):
        return self._loss(logits.float(), targets)

    def measure(self, logits, targets, indices):
        logits = logits.float()
        losses = F.cross_entropy(logits, targets, reduction='none')
        ranked = logits.topk(min(5, logits.shape[-1])).indices  # B, 5
        hits = ranked == targets[:, None]
        sums = {'loss': losses.double().sum(), 'top1': hits[:, :1].double().sum(), 'top5': hits.double().sum()}
        if self.real_labels is not None and indices is not None:
            sums |= self.real_labels.measure(ranked, indices)
        return sums

    def summarize(self, totals, count):
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

    def is_better(self, new, old):
        return new < old if self.config.eval_metric.endswith('loss') else new > old
