import os

import pytest
import torch
from hypothesis import settings

from tests.fuzz import budget

# No deadlines: a shared CI core may stall any example. Derandomized: a red build stays red when it is rerun.
settings.register_profile('default_suite', deadline=None, derandomize=True, max_examples=25, print_blob=True)
settings.load_profile('default_suite')

# The suite is thousands of small products: threads only wait for each other, for minutes where cores are shared.
# Processes started by tests inherit it: sums are split by thread, so a run of two threads ends in other bits.
os.environ['OMP_NUM_THREADS'] = '1'
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        '--budget', type=int, metavar='N', help='cases of each fuzzer under tests/fuzz (default: a few seconds of them)'
    )


def pytest_configure(config):
    budget.chosen = config.getoption('--budget')


@pytest.fixture(autouse=True)
def _clean_torch_state():
    """No test leaves its flags, threads or seed behind for the next one, even when it fails."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
