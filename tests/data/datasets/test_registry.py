import pytest

from nprf_vit.config.schema import FIELDS
from nprf_vit.data.datasets.registry import DATASETS, find_dataset, names_of, published_count


def test_one_entry_per_name_and_known_tasks():
    names = [entry.name for entry in DATASETS]
    assert len(set(names)) == len(names)
    assert {task for entry in DATASETS for task in entry.openers} == set(FIELDS['task'].metadata['choices'])


@pytest.mark.parametrize(
    'name, found',
    [
        ('', ''),
        ('torch/cifar100', 'torch/'),
        ('torch/cifar10', 'torch/cifar10'),
        ('digits', 'digits'),
        ('digits2', None),
        ('tor', None),
    ],
)
def test_names_are_found(name, found):
    entry = find_dataset(name)
    assert (None if entry is None else entry.name) == found


def test_a_name_is_for_its_tasks_alone():
    assert find_dataset('arrays', 'pixel') and not find_dataset('arrays', 'classification')
    assert names_of('pixel') == ['imagenet32_chrabaszcz', 'imagenet32_vandenoord', 'arrays', 'digits', 'torch/cifar10']


def test_counts_are_those_of_the_versions():
    assert published_count('imagenet32_vandenoord', 'validation') == 49_999
    assert published_count('digits', 'train') is None and published_count('harm', 'train') is None
