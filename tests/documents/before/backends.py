"""The bias that the reader has."""

import torch

bias = torch.randn(3, 27, 27)
