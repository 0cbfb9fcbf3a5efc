"""Augmentation and mixing are functions of their keys alone."""

import random

import numpy as np
import pytest
import torch

from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.batch_plan import plan_batches
from nprf_vit.data.datasets.digits import LEVELS, Digits
from nprf_vit.data.datasets.images import open_source
from nprf_vit.data.loaders import train_loader
from nprf_vit.data.mixup import BlockMixup
from nprf_vit.data.sample_order import SampleOrder, TrainBatches
from nprf_vit.data.samples import TrainSamples
from nprf_vit.data.seeding import derive_seed, seeded
from nprf_vit.data.transforms import train_transform

DEIT = {
    'model': 'm',
    'dataset': 'digits',
    'aa': 'rand-m9-mstd0.5-inc1',
    'color_jitter': 0.3,
    'reprob': 0.5,
    'train_interpolation': 'random',
}


def samples(**changes):
    config = make_config({**DEIT, **changes})
    source = open_source(config, 'train')
    transform = train_transform(config, (3, 16, 16), (0.5,) * 3, (0.2,) * 3)
    return TrainSamples(source, transform, config.seed), config


def test_a_sample_depends_on_its_key_alone():
    data, _ = samples()
    first = data[2, 5, 0].image
    random.random(), np.random.rand(), torch.rand(3)
    data[0, 9, 1]
    assert torch.equal(data[2, 5, 0].image, first)
    for key in ((3, 5, 0), (2, 5, 1), (2, 6, 0)):
        assert not torch.equal(data[key].image, first)
    other, _ = samples(seed=7)
    assert not torch.equal(other[2, 5, 0].image, first)


def test_random_generators_are_left_as_they_were():
    data, _ = samples()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    data[0, 0, 0]
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


@pytest.mark.parametrize('workers', [1, 2])
def test_batches_do_not_depend_on_the_number_of_workers(workers):
    def some_batches(count):
        data, config = samples(workers=count)
        batches = TrainBatches(SampleOrder(len(data.source), 32, config.seed), plan_batches(32, 1, 16))
        batches.start(1, 40)
        return list(train_loader(data, batches, config))

    for here, there in zip(some_batches(0), some_batches(workers), strict=True):
        assert torch.equal(here.images, there.images) and torch.equal(here.targets, there.targets)


def mixing(**changes):
    args = {'mixup_alpha': 0.8, 'cutmix_alpha': 1.0, 'prob': 1.0, 'switch_prob': 0.5, 'num_classes': 10}
    return BlockMixup(block=4, seed=1, **{**args, **changes})


@pytest.mark.parametrize('mode', ['batch', 'pair', 'elem'])
def test_mixing_acts_on_blocks(mode):
    images, targets = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    mix = mixing(mode=mode)
    whole = mix(images.clone(), targets, step=3, first_slot=8)
    parts = [mix(images[i : i + 4].clone(), targets[i : i + 4], step=3, first_slot=8 + i) for i in range(0, 16, 4)]
    for k in range(2):
        assert torch.equal(whole[k], torch.cat([part[k] for part in parts]))
    assert not torch.equal(whole[0], mix(images.clone(), targets, step=4, first_slot=8)[0])
    assert not torch.equal(whole[0], images)
    torch.testing.assert_close(whole[1].sum(-1), torch.ones(16))


def test_mixing_can_be_switched_off():
    images, targets = torch.randn(8, 3, 8, 8), torch.arange(8)
    same, soft = mixing(label_smoothing=0.0)(images.clone(), targets, step=0, first_slot=0, enabled=False)
    assert torch.equal(same, images)
    assert torch.equal(soft.argmax(-1), targets)


def test_seeds_are_fixed_for_all_time():
    """A change here would break the continuation of every run under way."""
    assert derive_seed(42, 'augment', 3, 17, 1) == derive_seed(42, 'augment', 3, 17, 1) < 2**63
    assert derive_seed(1, 23) != derive_seed(12, 3)
    with seeded(derive_seed(0, 'x')):
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    with seeded(derive_seed(0, 'x')):
        assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    train, val = Digits('train'), Digits('validation')
    assert (len(train), len(val)) == (1437, 360)
    for split in (train, val):
        shares = np.bincount(split.targets) / len(split)
        assert np.ptp(shares) < 0.015  # stratified: the classes themselves differ by this much
        assert int(split.levels.max()) == LEVELS - 1
    data = load_digits()
    key = sorted(zip(data.images.reshape(-1, 64).astype(int).tolist(), data.target.tolist()))
    ours = [(x.reshape(64).tolist(), int(t)) for d in (train, val) for x, t in zip(d.levels, d.targets)]
    assert sorted(ours) == key
    image, target = val[7]
    assert image.size == (8, 8) and image.mode == 'L' and target == int(val.targets[7])
