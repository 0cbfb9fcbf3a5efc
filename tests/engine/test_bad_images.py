"""Images that cannot be read: replaced in training by a rule and listed, never left out of an evaluation."""

import random

import pytest
import torch

from nprf_vit.data.batch import FaultKind, SampleFault
from nprf_vit.data.datasets.images import ImageSource
from nprf_vit.data.samples import TrainSamples
from nprf_vit.engine import faults
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.engine.tasks import classification
from nprf_vit.engine.validate import validate
from nprf_vit.errors import BadImage, InputError, RunError

from ..data.folders import digit_folder
from .running import ONE, assert_same_end, config_file, launch, logs, run_here, small_config


@pytest.fixture
def damaged(scans, tmp_path):
    """The usual run, with one training file cut off, one empty, and one gone once the folder has been listed."""
    root = digit_folder(tmp_path / 'data', train=40, val=10)
    train = root / 'train' / 'digit1'
    (train / '003.png').write_bytes((train / '003.png').read_bytes()[:60])
    (train / '007.png').write_bytes(b'')
    (train / '011.png').unlink()
    (train / '011.png').symlink_to('nowhere.png')
    return {**scans, 'data_dir': str(root), 'aug_repeats': 1}


def test_training_goes_on_and_lists_them(damaged, tmp_path, capsys):
    run_here(tmp_path / 'a', **damaged)
    said = capsys.readouterr().out
    assert '3 training images could not be read: bad_images.csv' in said
    met, listed = said.split('could not be read: bad_images.csv')
    for name in ('003', '007', '011'):
        assert f'digit1/{name}.png' in listed
        assert sum(f'digit1/{name}.png' in line for line in met.splitlines()) == 1
    rows = read_rows(tmp_path / 'a' / 'bad_images.csv')
    assert [row['index'] for row in rows] == ['43', '47', '51'] and 'FileNotFoundError' in rows[2]['problem']
    run_here(tmp_path / 'b', stop_at=7, workers=2, **damaged)
    run_here(tmp_path / 'b', resume='auto', **damaged)
    assert_same_end(tmp_path / 'a', tmp_path / 'b')


def test_two_processes_count_them_together(damaged, tmp_path):
    calm = {**damaged, 'drop': 0.0, 'drop_path': 0.0, 'log_interval': 1}
    run_here(tmp_path / 'a', **calm)
    launch('train.py', '--config', config_file(tmp_path, **calm), '--output', tmp_path / 'b', processes=2)
    assert read_rows(tmp_path / 'a' / 'bad_images.csv') == read_rows(tmp_path / 'b' / 'bad_images.csv')
    one, two = ([float(row['loss']) for row in logs(folder)[0]] for folder in (tmp_path / 'a', tmp_path / 'b'))
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), atol=1e-5, rtol=0)


def test_too_many_end_the_run(damaged, tmp_path):
    with pytest.raises(RunError, match=r'3 training images cannot be read \(max_bad_images 2\), the last: .*png'):
        run_here(tmp_path / 'out', max_bad_images=2, **damaged)
    assert len(read_rows(tmp_path / 'out' / 'bad_images.csv')) == 3


def test_the_stand_in_follows_from_seed_epoch_and_index():
    class Source(ImageSource):
        def __getitem__(self, index):
            if index % 2:
                raise BadImage('odd')
            return torch.tensor(float(index)), index

    data = [TrainSamples(Source(range(100), 'L', 'numbers'), lambda image: image, seed) for seed in (1, 1, 2)]
    first = data[0][3, 51, 0]
    assert first.target % 2 == 0 and first.fault == SampleFault(51, 'odd', FaultKind.UNREADABLE)
    assert data[1][3, 51, 0] == data[1][3, 51, 1] == first
    keys = (4, 51, 0), (3, 53, 0), (5, 51, 0)
    others = {data[0][key].target for key in keys} | {data[2][3, 51, 0].target}
    assert others != {first.target}
    assert data[0][3, 50, 0].fault is None


def test_evaluation_refuses_rather_than_counting_fewer(scans, tmp_path):
    root = digit_folder(tmp_path / 'data', train=40, val=10)
    keys = {**scans, 'data_dir': str(root)}
    run_here(tmp_path / 'whole', **keys)
    broken = root / 'val' / 'digit2' / '005.png'
    good = broken.read_bytes()
    broken.write_bytes(good[:50])
    message = '1 validation images cannot be read, and without them the result would be another: .*digit2/005.png'
    for changes in ({}, {'workers': 1}, {'val_limit': 8}):
        with pytest.raises(InputError, match=message):
            validate(small_config(**{**keys, **changes}), ONE, str(tmp_path / 'whole' / 'last.pt'))
    with pytest.raises(InputError, match=message):
        run_here(tmp_path / 'out', **keys)
    content = read_checkpoint(tmp_path / 'out' / 'last.pt')
    assert content['step'] == 5 and content['history'] == []  # nothing of the epoch is lost
    broken.write_bytes(good)
    run_here(tmp_path / 'out', resume='auto', **keys)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


def test_two_processes_refuse_together(scans, tmp_path):
    root = digit_folder(tmp_path / 'data', train=40, val=10)
    (root / 'val' / 'digit2' / '005.png').write_bytes(b'')
    file = config_file(tmp_path, **{**scans, 'data_dir': str(root), 'epochs': 1, 'warmup_epochs': 0})
    done = launch('train.py', '--config', file, '--output', tmp_path / 'out', processes=2, expect=1)
    assert 'error: 1 validation images cannot be read' in done.stderr and 'exitcode  : 2' in done.stderr


class _Moody:
    """A transform that raises for one sample in ten, by its random numbers."""

    def __init__(self, transform, share=0.1):
        self.transform, self.share = transform, share

    def __call__(self, image):
        if random.random() < self.share:
            raise ValueError('bits must be between or equal to 1 and 8')
        return self.transform(image)


@pytest.fixture
def moody(monkeypatch):
    real = classification.train_transform
    monkeypatch.setattr(classification, 'train_transform', lambda *args: _Moody(real(*args)))


def test_failed_augmentations_are_counted_listed_and_survived(moody, scans, tmp_path, capsys):
    keys = {**scans, 'aug_repeats': 2}
    run_here(tmp_path / 'a', **keys)
    said = capsys.readouterr().out
    rows = read_rows(tmp_path / 'a' / 'bad_images.csv')
    content = read_checkpoint(tmp_path / 'a' / 'last.pt')
    total = content['failed_augmentations']
    assert 10 < total < 60 and f'{total} augmentations failed: bad_images.csv has the first of them' in said
    assert 5 < len(rows) == len(content['unaugmented']) <= total and content['bad_images'] == {}
    assert all('cannot augment image' in row['problem'] and 'ValueError: bits' in row['problem'] for row in rows)
    assert said.count('another training image takes its place') == len(rows)
    run_here(tmp_path / 'b', stop_at=7, workers=2, **keys)
    run_here(tmp_path / 'b', resume='auto', **keys)
    assert_same_end(tmp_path / 'a', tmp_path / 'b')


def test_a_share_of_failed_augmentations_ends_the_run(moody, scans, tmp_path):
    message = r'\d+ of \d+ augmentations failed \(more than max_bad_images 8 and than 1%\), .*ValueError: bits'
    with pytest.raises(RunError, match=message):
        run_here(tmp_path / 'out', max_bad_images=8, **scans)
    assert read_rows(tmp_path / 'out' / 'bad_images.csv')


def test_a_rare_failure_never_ends_it_and_is_not_listed_for_ever(scans, tmp_path, monkeypatch):
    monkeypatch.setattr(faults, 'MAX_UNAUGMENTED', 0.5)
    monkeypatch.setattr(faults, 'LISTED', 4)
    real = classification.train_transform
    monkeypatch.setattr(classification, 'train_transform', lambda *args: _Moody(real(*args)))
    run_here(tmp_path / 'out', max_bad_images=0, **scans)
    assert len(read_rows(tmp_path / 'out' / 'bad_images.csv')) == 4
    assert read_checkpoint(tmp_path / 'out' / 'last.pt')['failed_augmentations'] > 10
