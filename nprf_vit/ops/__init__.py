from .attention import choose_backend, kernel_attention
from .features import draw_projection, feature_map
from .step import DecodeState
from .toeplitz import toeplitz_matmul

__all__ = [
    'DecodeState',
    'choose_backend',
    'draw_projection',
    'feature_map',
    'kernel_attention',
    'toeplitz_matmul',
]
