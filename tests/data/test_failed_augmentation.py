"""A transform that raises costs its sample, not the run."""

import numpy as np
import pytest
import torch
from PIL import Image

from nprf_vit.data.batch import FaultKind, SampleFault
from nprf_vit.data.datasets.images import ImageSource
from nprf_vit.data.loaders import _StreamTransform
from nprf_vit.data.samples import ATTEMPTS, EvalSamples, TrainSamples
from nprf_vit.data.seeding import derive_seed, seeded
from nprf_vit.errors import BadImage, RunError

FAILURES = ValueError('bits must be 1 to 8'), MemoryError(), OSError('broken'), RuntimeError('x'), AssertionError()


def source(count=50):
    return ImageSource([(Image.new('L', (4, 4), i), i) for i in range(count)], 'L', 'squares')


def failing(error, share=0.2):
    """A transform that raises by its random numbers, as RandAugment did."""

    def transform(image):
        if np.random.rand() < share:
            raise error
        return torch.tensor(float(np.asarray(image)[0, 0])) + float(np.random.rand())

    return transform


@pytest.mark.parametrize('error', FAILURES, ids=lambda error: type(error).__name__)
def test_another_image_stands_in_and_the_fault_says_why(error):
    data = TrainSamples(source(), failing(error), seed=1)
    noted = 0
    for index in range(50):
        sample, again = data[0, index, 0], data[0, index, 0]
        assert again == sample
        assert int(sample.image) == sample.target  # image and label belong together, whichever image it is
        if sample.fault is None:
            assert sample.target == index
            continue
        noted += 1
        assert sample.fault.index == index and sample.fault.kind is FaultKind.UNAUGMENTED
        problem = sample.fault.problem
        assert problem.startswith(f'cannot augment image {index} of squares, squares[{index}]: {type(error).__name__}')
    assert 2 < noted < 25


def test_samples_that_do_not_fail_are_what_they_were():
    data, quiet = (TrainSamples(source(), failing(ValueError('x'), share), seed=1) for share in (0.2, 0.0))
    kept = [index for index in range(50) if data[0, index, 0].fault is None]
    assert len(kept) > 25 and all(data[0, index, 0] == quiet[0, index, 0] for index in kept)


def test_a_transform_that_always_fails_ends_with_its_reason():
    data = TrainSamples(source(), failing(ValueError('no such thing'), share=1.0), seed=1)
    with pytest.raises(
        RunError, match=f'{ATTEMPTS} images .* cannot be read or augmented, .*ValueError: no such thing'
    ):
        data[0, 3, 0]


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_request_to_leave_passes(error):
    for data, key in (
        (TrainSamples(source(), failing(error, 1.0), 1), (0, 3, 0)),
        (EvalSamples(source(), failing(error, 1.0)), 3),
    ):
        with pytest.raises(error):
            data[key]


def test_evaluation_has_no_stand_in():
    def transform(image):
        if np.asarray(image)[0, 0] == 7:
            raise ValueError('seven')
        return torch.zeros(1)

    data = EvalSamples(source(), transform)
    reason = 'cannot transform image 7 of squares, squares[7]: ValueError: seven'
    assert (data[6].index, data[6].fault) == (6, None)
    assert (data[7].index, data[7].fault) == (7, SampleFault(7, reason, FaultKind.UNAUGMENTED))
    subset = EvalSamples(torch.utils.data.Subset(source(), [3, 7]), transform)
    assert subset[1].fault == SampleFault(1, reason, FaultKind.UNAUGMENTED)


def test_a_stream_tries_again_with_other_random_numbers():
    make = _StreamTransform(failing(ValueError('x'), 0.5), seed=1, rank=0)
    image = Image.new('L', (4, 4), 9)
    with pytest.warns(UserWarning, match='cannot augment image .* of a stream: ValueError: x; tried again'):
        values = [float(make(image)) for _ in range(20)]
    quiet = _StreamTransform(failing(ValueError('x'), 0.0), seed=1, rank=0)
    same = [value == float(quiet(image)) for value in values]
    assert 2 < sum(same) < 18 and all(9 <= value < 10 for value in values)
    always = _StreamTransform(failing(ValueError('x'), 1.0), seed=1, rank=0)
    with pytest.warns(UserWarning), pytest.raises(BadImage, match=f'ValueError: x, and {ATTEMPTS} times so'):
        always(image)


def test_the_first_random_numbers_are_those_of_the_key():
    """Or the augmentation of runs under way would change."""
    data = TrainSamples(source(), failing(ValueError('x'), 0.0), seed=1)
    with seeded(derive_seed(1, 'augment', 2, 5, 1)):
        np.random.rand()
        expected = torch.tensor(5.0) + float(np.random.rand())
    assert torch.equal(data[2, 5, 1].image, expected)
