"""Fake CUDA tensors where there is no driver."""

import pytest
import torch

needs_fake_cuda = pytest.mark.skipif(
    torch.__version__ < (2, 9) and not torch.cuda.is_available(),
    reason='before torch 2.9, slicing a fake CUDA tensor asks for the driver',
)
