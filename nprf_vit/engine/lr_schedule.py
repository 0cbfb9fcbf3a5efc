"""Learning-rate schedules that timm does not have."""

import torch
from timm.scheduler.scheduler import Scheduler


class InverseSqrtLR(Scheduler):
    """Linear warm-up to the peak, then the peak times √(warm-up steps / step).

    Args:
        optimizer: Its learning rates are the peaks.
        warmup_steps: Updates until the peak, at least one.
        warmup_lr: Rate before the first update.
        min_lr: Lower limit afterwards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_steps: int, warmup_lr: float, min_lr: float = 0.0):
        super().__init__(optimizer, param_group_field='lr', t_in_epochs=False)
        self.warmup_steps, self.warmup_lr, self.min_lr = warmup_steps, warmup_lr, min_lr

    def _get_lr(self, t: int) -> list[float]:
        if t < self.warmup_steps:
            share = t / self.warmup_steps
            return [self.warmup_lr + share * (peak - self.warmup_lr) for peak in self.base_values]
        return [max(self.min_lr, peak * (self.warmup_steps / t) ** 0.5) for peak in self.base_values]
