"""What a transform would produce is bounded: a row of pixels must not become gigabytes."""

import pytest
from PIL import Image
from timm.data import create_transform

from nprf_vit.data.datasets.images import ImageSource
from nprf_vit.data.resizing import BoundedTransform, resized
from nprf_vit.data.samples import EvalSamples
from nprf_vit.errors import BadImage

from .limits import run_limited


class Files:
    """An indexed dataset of one file."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Image.open(self.path), 0


def test_a_row_of_pixels_does_not_become_gigabytes(tmp_path):
    Image.new('L', (60_000, 1)).save(tmp_path / 'x.png')
    source = ImageSource(Files(tmp_path / 'x.png'), 'RGB', 'files')
    transform = create_transform((3, 224, 224), is_training=False, crop_pct=0.9)
    bounded = BoundedTransform(transform, source.max_pixels)
    problem = run_limited(lambda: EvalSamples(source, bounded)[0].fault.problem, megabytes=500)
    assert problem.startswith('cannot read image 0 of files') and '14880000x248 pixels, more than max_pixels' in problem
    # without the bound there is at least no crash: what does not fit into memory is a bad image too
    problem = run_limited(lambda: EvalSamples(source, transform)[0].fault.problem, megabytes=500)
    assert problem.startswith('cannot transform image 0 of files') and 'MemoryError' in problem


@pytest.mark.parametrize('size', [(40, 30), (30, 40), (301, 7), (7, 301), (1, 1)])
@pytest.mark.parametrize(
    'args',
    [
        {'is_training': False},
        {'is_training': False, 'crop_pct': 1.0, 'crop_mode': 'squash'},
        {'is_training': False, 'crop_mode': 'border'},
        {'is_training': True, 'no_aug': True},
    ],
)
@pytest.mark.parametrize('target', [(3, 32, 32), (3, 32, 48)])
def test_sizes_are_those_of_the_transform(size, args, target):
    transform = create_transform(target, **args)
    bounded = BoundedTransform(transform, 10**6)
    (part,) = bounded.resizings
    image = Image.new('RGB', size)
    got = part(image).size
    assert all(abs(a - b) <= 1 for a, b in zip(resized(part, *size), got))
    limited = BoundedTransform(transform, got[0] * got[1] // 2)
    with pytest.raises(BadImage, match='more than max_pixels'):
        limited(image)
    assert bounded(image).shape == target
