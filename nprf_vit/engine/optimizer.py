"""Optimizer, gradient scaler and autocast, as timm and torch build them."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from torch import nn

from nprf_vit.config.schema import Config
from nprf_vit.errors import InputError
from nprf_vit.layers import RelPosBias

FUSED_DEVICES: tuple[str, ...] = ('cuda',)  # torch has it for CPUs too, where results would change
_WITH_FUSED = ('adam', 'adamw')
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    if config.lr is None:
        raise InputError('the key lr is missing: the peak learning rate is never guessed, e.g. lr: 1e-3')
    args: dict[str, Any] = {'betas': config.opt_betas, 'eps': config.opt_eps, 'fused': _fused(config, model)}
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


def _fused(config: Config, model: nn.Module) -> bool | None:
    """Whether torch updates all weights in one kernel; None for optimizers that are not asked."""
    device = next(model.parameters()).device.type
    return True if config.opt.lower() in _WITH_FUSED and device in FUSED_DEVICES else None


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


def build_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type, enabled=config.amp and config.amp_dtype == 'float16')


def build_autocast(config: Config, device: torch.device) -> Autocast:
    if not config.amp:
        return contextlib.nullcontext
    dtype = getattr(torch, config.amp_dtype)
    return lambda: torch.autocast(device.type, dtype=dtype)
