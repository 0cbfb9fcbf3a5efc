import torch as _torch

from .attention import kernel_attention
from .decode import DecodeState
from .dispatch import choose_backend
from .features import draw_projection, feature_map
from .toeplitz import toeplitz_matmul

__all__ = [
    'DecodeState',
    'choose_backend',
    'draw_projection',
    'feature_map',
    'kernel_attention',
    'toeplitz_matmul',
]

# glibc returns freed pages to the kernel after every op until it has once seen a large block freed. At 14×14 tokens the
# page faults cost half as much as the attention; one block that is never touched ends them for the process.
_torch.empty(31 << 20, dtype=_torch.uint8, device='cpu')
