"""DeiT's augmentation and the centre crop, as timm builds them."""

from typing import Any

from timm.data import create_transform

from ..errors import InputError, first_line
from .samples import Transform


def train_transform(config: Any, input_size: tuple[int, int, int], mean: tuple, std: tuple) -> Transform:
    # random erasing runs per sample on the CPU: on the device's batch it would depend on who shares the batch
    return _create(
        config,
        input_size,
        is_training=True,
        no_aug=config.no_aug,
        scale=config.scale,
        ratio=config.ratio,
        hflip=config.hflip,
        vflip=config.vflip,
        color_jitter=config.color_jitter,
        auto_augment=config.aa,
        interpolation=config.train_interpolation,
        re_prob=config.reprob,
        re_mode=config.remode,
        re_count=config.recount,
        mean=mean,
        std=std,
    )


def eval_transform(config: Any, input_size: tuple[int, int, int], mean: tuple, std: tuple) -> Transform:
    return _create(
        config,
        input_size,
        is_training=False,
        interpolation=config.interpolation,
        crop_pct=config.crop_pct,
        crop_mode=config.crop_mode,
        mean=mean,
        std=std,
    )


def _create(config: Any, input_size: tuple[int, int, int], **args: Any) -> Transform:
    try:
        return create_transform(input_size, **args)
    except (AssertionError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError(f'cannot build the transforms of aa {config.aa}: {first_line(error)}') from error
