"""Optimizer, learning-rate schedule and gradient scaler, as timm and torch build them."""

import contextlib
from collections.abc import Callable

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from nprf_vit.config.schema import Config
from nprf_vit.errors import InputError
from nprf_vit.layers import RelPosBias

from .lr_schedule import InverseSqrtLR


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    if config.lr is None:
        raise InputError('the key lr is missing: the peak learning rate is never guessed, e.g. lr: 1e-3')
    args = {'betas': config.opt_betas, 'eps': config.opt_eps}
    try:
        optimizer = create_optimizer_v2(
            model,
            opt=config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            layer_decay=config.layer_decay,
            **{name: value for name, value in args.items() if value is not None},
        )
    except (ValueError, AssertionError, TypeError) as error:
        raise InputError(f'cannot build optimizer {config.opt}: {error}') from error
    if config.rel_pos_lr_scale != 1:
        _scale_bias_lr(optimizer, model, config.rel_pos_lr_scale)
    return optimizer


def _scale_bias_lr(optimizer: torch.optim.Optimizer, model: nn.Module, scale: float) -> None:
    """Give the relative position biases groups of their own, whose `lr_scale` timm's schedules multiply by."""
    biases = {id(p) for m in model.modules() if isinstance(m, RelPosBias) for p in m.parameters()}
    if not biases:
        raise InputError(f'rel_pos_lr_scale {scale}: {type(model).__name__} has no relative position bias to scale')
    for group in list(optimizer.param_groups):
        own = [p for p in group['params'] if id(p) in biases]
        if own:
            group['params'] = [p for p in group['params'] if id(p) not in biases]
            own_group = {**group, 'params': own, 'lr_scale': scale * group.get('lr_scale', 1.0)}
            optimizer.param_groups.insert(0, own_group)


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The schedule's own rate, as reports have it: that of a group which neither layer_decay nor a bias scales."""
    groups = optimizer.param_groups
    return next((g for g in reversed(groups) if g.get('lr_scale', 1.0) == 1.0), groups[-1])['lr']


def build_scheduler(config: Config, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Scheduler:
    """A schedule per update, without state: `step_update(step)` sets the rate that holds after `step` updates."""
    if config.sched == 'inverse_sqrt':
        if not config.warmup_epochs:
            raise InputError('sched inverse_sqrt falls from the end of its warm-up: set warmup_epochs')
        scheduler = InverseSqrtLR(optimizer, config.warmup_epochs * steps_per_epoch, config.warmup_lr, config.min_lr)
        scheduler.step_update(0)
        return scheduler
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
    scheduler.step_update(0)
    return scheduler


def build_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type, enabled=config.amp and config.amp_dtype == 'float16')


def build_autocast(config: Config, device: torch.device) -> Callable[[], contextlib.AbstractContextManager]:
    if not config.amp:
        return contextlib.nullcontext
    dtype = getattr(torch, config.amp_dtype)
    return lambda: torch.autocast(device.type, dtype=dtype)
