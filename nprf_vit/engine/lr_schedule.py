"""The learning-rate schedule: a rate per update, and the ones that timm does not have."""

import torch
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler

from nprf_vit.config.schema import Config
from nprf_vit.errors import InputError


class InverseSqrtLR(Scheduler):
    """Linear warm-up to the peak, then the peak times √(warm-up steps / step).

    Args:
        optimizer: Its learning rates are the peaks.
        warmup_steps: Updates until the peak, at least one.
        warmup_lr: Rate before the first update.
        min_lr: Lower limit afterwards.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup_steps: int, warmup_lr: float, min_lr: float = 0.0
    ) -> None:
        super().__init__(optimizer, param_group_field='lr', t_in_epochs=False)
        self.warmup_steps, self.warmup_lr, self.min_lr = warmup_steps, warmup_lr, min_lr

    def _get_lr(self, t: int) -> list[float]:
        if t < self.warmup_steps:
            share = t / self.warmup_steps
            return [self.warmup_lr + share * (peak - self.warmup_lr) for peak in self.base_values]
        return [max(self.min_lr, peak * (self.warmup_steps / t) ** 0.5) for peak in self.base_values]


class LRSchedule:
    """A schedule without state of its own: `step_update(step)` sets the rates that hold after `step` updates.

    `lr` is the schedule's own rate, as reports have it: before the factors `lr_scale` by which layer_decay and
    rel_pos_lr_scale change it for single groups of parameters.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.step_update(0)

    def step_update(self, step: int) -> None:
        self.lr: float = self.scheduler._get_lr(step)[0]  # all groups have the same peak
        self.scheduler.step_update(step)


def build_schedule(config: Config, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> LRSchedule:
    if config.sched == 'inverse_sqrt':
        if not config.warmup_epochs:
            raise InputError('sched inverse_sqrt falls from the end of its warm-up: set warmup_epochs')
        warmup_steps = config.warmup_epochs * steps_per_epoch
        return LRSchedule(InverseSqrtLR(optimizer, warmup_steps, config.warmup_lr, config.min_lr))
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.sched,
        num_epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        decay_epochs=config.decay_epochs,
        decay_rate=config.decay_rate,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    return LRSchedule(scheduler)
