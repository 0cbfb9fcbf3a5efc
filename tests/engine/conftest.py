import pytest
import torch

from ..data.folders import CLASSES, digit_folder


@pytest.fixture(autouse=True, scope='session')
def _one_thread():
    """The models here are too small to gain from a second thread, and threads that wait for each other cost most."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope='session')
def scans(tmp_path_factory):
    """Keys for a run of five steps per epoch on an image folder of 160 digit scans."""
    root = digit_folder(tmp_path_factory.mktemp('scans'), train=40, val=10)
    sizes = {'global_batch': 32, 'batch_size': 16, 'log_interval': 2}
    return {'dataset': '', 'data_dir': str(root), 'num_classes': CLASSES, **sizes}
