import pytest

from ..data.folders import CLASSES, digit_folder


@pytest.fixture(scope='session')
def scans(tmp_path_factory):
    """Keys for a run of five steps per epoch on an image folder of 160 digit scans."""
    root = digit_folder(tmp_path_factory.mktemp('scans'), train=40, val=10)
    sizes = {'global_batch': 32, 'batch_size': 16, 'log_interval': 2}
    return {'dataset': '', 'data_dir': str(root), 'num_classes': CLASSES, **sizes}
