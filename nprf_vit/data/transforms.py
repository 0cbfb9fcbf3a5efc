"""DeiT's augmentation and the centre crop, as timm builds them."""

from collections.abc import Iterator
from typing import Any

from PIL import Image
from timm.data import auto_augment, create_transform

from nprf_vit.config.schema import Config

from ..errors import InputError, first_line
from .samples import Transform


def train_transform(config: Config, input_size: tuple[int, int, int], mean: tuple, std: tuple) -> Transform:
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


def eval_transform(config: Config, input_size: tuple[int, int, int], mean: tuple, std: tuple) -> Transform:
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


def _create(config: Config, input_size: tuple[int, int, int], **args: Any) -> Transform:
    try:
        transform = create_transform(input_size, **args)
    except (AssertionError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError(f'cannot build the transforms of aa {config.aa}: {first_line(error)}') from error
    for op in _augment_ops(transform):
        if op.aug_fn is auto_augment.posterize:
            op.aug_fn = _posterize
    return transform


def _augment_ops(transform: Any) -> Iterator[auto_augment.AugmentOp]:
    """The operations among which RandAugment, AugMix or AutoAugment choose; none without any of these."""
    for part in transform.transforms:
        if isinstance(part, (auto_augment.RandAugment, auto_augment.AugMixAugment)):
            yield from part.ops
        elif isinstance(part, auto_augment.AutoAugment):
            yield from (op for policy in part.policy for op in policy)


def _posterize(image: Image.Image, bits_to_keep: int, **args: Any) -> Image.Image:
    """timm's, also for the 0 bits that RandAugment's highest level asks for: a black image.

    So did Pillow when DeiT was trained; from 13 on it refuses them.
    """
    if bits_to_keep <= 0:  # below 0 where the key aa allows levels above timm's 10, by mmax
        return Image.new(image.mode, image.size)
    return auto_augment.posterize(image, bits_to_keep, **args)
