"""Images that travel as bytes are the same to the last bit once the device has normalized them."""

import numpy as np
import pytest
import torch
from PIL import Image

from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.batch import Sample, collate, collate_pairs
from nprf_vit.data.byte_images import ByteImage, split_transform
from nprf_vit.data.seeding import seeded
from nprf_vit.data.transforms import eval_transform, train_transform
from nprf_vit.engine.transfer import BatchTransfer

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pictures(count=24):
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 60, (count, 2))
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]


def batch_of(transform, images):
    samples = []
    for number, image in enumerate(images):
        with seeded(number):
            samples.append(Sample(transform(image), number))
    return collate(samples)


@pytest.mark.parametrize('remode', ['pixel', 'rand', 'const'])
@pytest.mark.parametrize('recount', [1, 3])
def test_training_images(remode, recount):
    keys = {'model': 'm', 'aa': 'rand-m9-mstd0.5-inc1', 'reprob': 0.5, 'remode': remode, 'recount': recount}
    whole = train_transform(make_config(keys), (3, 24, 32), MEAN, STD)
    on_host, on_device = split_transform(whole)
    expected, batch = batch_of(whole, pictures()), batch_of(on_host, pictures())
    assert batch.images.dtype == torch.uint8 and 4 < len({i for i, _ in batch.erased}) < 20
    images, targets = BatchTransfer(torch.device('cpu'), on_device)(batch)
    assert torch.equal(images, expected.images) and torch.equal(targets, expected.targets)
    assert not torch.equal(on_device(batch.images), expected.images)  # without the erased parts


def test_validation_images():
    whole = eval_transform(make_config({'model': 'm'}), (3, 24, 24), MEAN, STD)
    on_host, on_device = split_transform(whole)
    expected, batch = batch_of(whole, pictures()), batch_of(on_host, pictures())
    assert batch.erased == [] and torch.equal(on_device(batch.images), expected.images)
    assert on_device(torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)).unique().numel() == 3 * 256


def test_a_stream_of_bytes():
    image = ByteImage(torch.zeros(3, 2, 2, dtype=torch.uint8), [])
    batch = collate_pairs([(image, 1), (image, 2)])
    assert batch.images.shape == (2, 3, 2, 2) and batch.targets.tolist() == [1, 2] and batch.indices is None


def test_other_transforms_stay_whole():
    assert split_transform(lambda image: image) is None
