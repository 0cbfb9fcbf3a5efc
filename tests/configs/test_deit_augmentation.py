"""RandAugment gives the pixels that DeiT's authors had: those of timm 0.3.2 with Pillow 8.0.1."""

import random
import zlib

import numpy as np
import pytest
from PIL import Image
from timm.data.auto_augment import RandAugment

from nprf_vit.config.yaml_file import load_config
from nprf_vit.data.transforms import train_transform

from .test_tables import IMAGENET

# checksums over 100 seeds, from those two; Pillow 9.2 and 10.4 with timm 1.0 give the same
OPERATIONS = {
    'AutoContrast': 0xD5FD69B9,
    'Equalize': 0x80C1DB7D,
    'Invert': 0xB58CD3DD,
    'Rotate': 0xD91158FC,
    'PosterizeIncreasing': 0x25BB6620,
    'SolarizeIncreasing': 0xE61FC1C8,
    'SolarizeAdd': 0x4442DFF4,
    'ColorIncreasing': 0xFFE2C328,
    'ContrastIncreasing': 0x11323D38,
    'BrightnessIncreasing': 0x7C2C3CA9,
    'SharpnessIncreasing': 0xBD4CC3BC,
    'ShearX': 0xE95DF678,
    'ShearY': 0x3A2C8431,
    'TranslateXRel': 0xB4E26D9F,
    'TranslateYRel': 0x2CDFE811,
}
WHOLE = 0xEDD9C1B4  # over 200 seeds, the choice of operations included


def picture():
    y, x, channel = np.mgrid[:48, :64, :3]
    return Image.fromarray(((3 * x + 2 * y * (channel + 1) + x * y * 37 % 29) % 200 + 30).astype(np.uint8))


def rand_augment():
    config = load_config(IMAGENET / 'nprf_deit_base.yaml')
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    (found,) = [
        part for part in train_transform(config, (3, 224, 224), mean, std).transforms if isinstance(part, RandAugment)
    ]
    return found


def checksum(operation, seeds):
    total = 0
    for seed in range(seeds):
        random.seed(seed), np.random.seed(seed)
        total = zlib.crc32(np.asarray(operation(picture())).tobytes(), total)
    return total


def test_the_operations_are_those_of_deit():
    assert [op.name for op in rand_augment().ops] == list(OPERATIONS)


@pytest.mark.parametrize('name', OPERATIONS)
def test_pixels_of_an_operation(name):
    (op,) = [op for op in rand_augment().ops if op.name == name]
    assert op.prob == 0.5 and op.magnitude == 9 and op.magnitude_std == 0.5
    op.prob = 1.0
    assert checksum(op, 100) == OPERATIONS[name]
    op.aug_fn = lambda image, *_, **__: image
    assert checksum(op, 100) != OPERATIONS[name]


def test_pixels_of_the_whole():
    assert checksum(rand_augment(), 200) == WHOLE
