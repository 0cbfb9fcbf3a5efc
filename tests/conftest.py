import pytest
import torch
from hypothesis import settings

# No deadlines: a shared CI core may stall any example. Derandomized: a red build stays red when it is rerun.
settings.register_profile('default_suite', deadline=None, derandomize=True, max_examples=25, print_blob=True)
settings.load_profile('default_suite')


@pytest.fixture(autouse=True)
def _clean_torch_state():
    """A test that fails half-way leaves neither determinism flags nor a seed behind for the next one."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
