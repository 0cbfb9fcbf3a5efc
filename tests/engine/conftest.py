import pytest
import torch


@pytest.fixture(autouse=True, scope='session')
def _one_thread():
    """The models here are too small to gain from a second thread, and threads that wait for each other cost most."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
