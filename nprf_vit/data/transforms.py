"""DeiT's augmentation and the centre crop, as timm builds them."""

from typing import Any

from timm.data import create_transform

from .samples import Transform


def train_transform(config: Any, input_size: tuple[int, int, int], mean: tuple, std: tuple) -> Transform:
    # random erasing runs per sample on the CPU: on the device's batch it would depend on who shares the batch
    return create_transform(
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
    return create_transform(
        input_size,
        is_training=False,
        interpolation=config.interpolation,
        crop_pct=config.crop_pct,
        crop_mode=config.crop_mode,
        mean=mean,
        std=std,
    )
