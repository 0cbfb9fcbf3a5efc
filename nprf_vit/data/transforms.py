"""Input size, mean and std of a model's images; DeiT's augmentation and the centre crop, as timm builds them."""

from collections.abc import Iterator
from typing import Any

from PIL import Image
from timm.data import auto_augment, create_transform
from timm.layers import to_2tuple
from torch import nn

from nprf_vit.config.schema import Config

from ..errors import InputError, first_line
from .samples import Transform


def model_input_size(config: Config, model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of what the model is given."""
    size = config.img_size or tuple(model.pretrained_cfg.get('input_size', (3, 224, 224))[-2:])
    return config.in_chans, *to_2tuple(size)


def mean_and_std(config: Config, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the inputs: the configuration's, else the model's."""
    found = []
    for name in ('mean', 'std'):
        values = getattr(config, name) or model.pretrained_cfg.get(name, ())
        if len(values) != config.in_chans:
            raise InputError(f'{config.model} has no {name} for {config.in_chans} channels: give the key {name}')
        found.append(tuple(values))
    return found[0], found[1]


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
