"""A stream (wds, tfds): checkpoints and resume at epoch boundaries only, and said so."""

import pytest
import torch
from timm.data.dataset import IterableImageDataset

from nprf_vit.data.datasets.digits import Digits
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.tasks.classification import Classification
from nprf_vit.errors import InputError

from .running import run_here, same

KEYS = {'dataset': 'wds/digits', 'aug_repeats': 1, 'global_batch': 256, 'batch_size': 64, 'epochs': 2}


class Reader:
    """Shuffles by epoch and yields in order, as timm's streaming readers do."""

    def __init__(self, split):
        self.digits, self.epoch = Digits(split), 0

    def __len__(self):
        return len(self.digits)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch))
        return (self.digits[i] for i in order.tolist())


@pytest.fixture(autouse=True)
def _streams(monkeypatch):
    opened = staticmethod(lambda config, split: IterableImageDataset('', reader=Reader(split)))
    monkeypatch.setattr(Classification, 'open_images', opened)


def test_resume_at_the_epoch_boundary(tmp_path, capsys):
    whole = run_here(tmp_path / 'a', **KEYS)
    assert whole['images'] == 360
    assert 'is read in order: checkpoints and resume at epoch boundaries only' in capsys.readouterr().out
    run_here(tmp_path / 'b', stop_at=8, recovery_interval=1, **KEYS)
    assert read_checkpoint(tmp_path / 'b' / 'last.pt')['step'] == 5  # the end of the first epoch
    run_here(tmp_path / 'b', resume='auto', **KEYS)
    a, b = (read_checkpoint(tmp_path / name / 'last.pt') for name in 'ab')
    assert same(a['state_dict'], b['state_dict']) == [] and a['step'] == b['step'] == 10


def test_what_a_stream_cannot_do(tmp_path):
    with pytest.raises(InputError, match='repeated augmentation needs access by index'):
        run_here(tmp_path, **{**KEYS, 'aug_repeats': 3})
    with pytest.raises(InputError, match='real_labels need file names'):
        run_here(tmp_path, **KEYS, real_labels='bundled')
