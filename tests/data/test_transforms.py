"""timm's augmentations with the installed Pillow: none raises, at any level, on any image that can be decoded."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment

from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.image_file import to_mode
from nprf_vit.data.transforms import _augment_ops, train_transform

DEIT = 'rand-m9-mstd0.5-inc1'
MEAN = {'RGB': (0.485, 0.456, 0.406), 'L': (0.3,)}
SIZES = (1, 1), (1, 7), (5, 1), (3, 400), (40, 30)


def picture(mode='RGB', size=(40, 30)):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def transform(aa=DEIT, mode='RGB'):
    config = make_config({'model': 'm', 'aa': aa, 'reprob': 0.25})
    mean = MEAN[mode]
    return train_transform(config, (len(mean), 32, 32), mean, (0.2,) * len(mean))


def ops(aa=DEIT, mode='RGB'):
    return list(_augment_ops(transform(aa, mode)))


@pytest.mark.parametrize('aa', [DEIT, 'rand-m9-mstd0.5', 'augmix-m5', 'original', 'v0r', '3a'])
def test_the_operations_of_every_kind_of_policy_are_found(aa):
    names = {op.name for op in ops(aa)}
    assert names and names <= set(auto_augment.NAME_TO_OP)
    assert any('Posterize' in name for name in names) == (aa != '3a')
    assert not any(op.aug_fn is auto_augment.posterize for op in ops(aa))


@pytest.mark.parametrize('mode', MEAN)
def test_no_bits_kept_is_a_black_image(mode):
    image = picture(mode)
    (op,) = [op for op in ops(mode=mode) if op.name == 'PosterizeIncreasing']
    op.magnitude, op.magnitude_std, op.prob = 10, 0, 1.0
    black = op(image)
    assert black.mode == mode and black.size == image.size and not np.asarray(black).any()
    assert not np.asarray(op.aug_fn(image, -3)).any()
    for bits in (1, 2, 4, 7):  # what Pillow has always done with more
        assert np.array_equal(np.asarray(op.aug_fn(image, bits)), np.asarray(image) & (256 - 2 ** (8 - bits)))
    assert op.aug_fn(image, 8) is image
    assert auto_augment.NAME_TO_OP['Posterize'] is auto_augment.posterize  # timm itself is left as it is


@pytest.mark.parametrize('mode', MEAN)
@pytest.mark.parametrize('aa', [DEIT, 'rand-m9-mstd0.5-mmax30', 'augmix-m5'])
def test_no_operation_raises_at_its_extremes(aa, mode):
    for op in ops(aa, mode):
        op.prob, op.magnitude_std = 1.0, 0
        for level in (0, 0.01, 2.49, 5, 9.99, 10, 30):
            op.magnitude = level
            for size in SIZES:
                for seed in range(2):  # either direction
                    random.seed(seed)
                    result = op(picture(mode, size))
                    assert result.mode == mode and result.size == size, (op.name, level)


@pytest.mark.parametrize('kind', ['1', 'L', 'LA', 'P', 'PA', 'RGB', 'RGBA', 'CMYK', 'YCbCr', 'HSV', 'LAB', 'I;16'])
def test_the_whole_recipe_on_every_kind_of_image(kind):
    make = transform()
    if kind == 'I;16':
        image = Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54)
    else:
        image = picture('L' if kind == 'PA' else 'RGB').convert(kind)
    for seed in range(40):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        sample = make(to_mode(image, 'RGB'))
        assert sample.shape == (3, 32, 32) and sample.isfinite().all()


@pytest.mark.parametrize('size', SIZES)
def test_the_whole_recipe_on_every_size(size):
    make = transform()
    for seed in range(60):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        assert make(picture('RGB', size)).shape == (3, 32, 32)
