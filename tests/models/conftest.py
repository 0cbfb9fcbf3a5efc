import pytest
import torch


@pytest.fixture
def image():
    return torch.randn(2, 3, 64, 64)
