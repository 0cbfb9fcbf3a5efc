from . import flops as _flops  # noqa: F401  registers what FlopCounterMode counts
from .attention import kernel_attention
from .bias import PrefixBias
from .decode import DecodeState
from .dispatch import choose_backend
from .features import draw_projection, feature_map
from .prefix import prefix_attention
from .toeplitz import toeplitz_matmul

__all__ = [
    'DecodeState',
    'PrefixBias',
    'choose_backend',
    'draw_projection',
    'feature_map',
    'kernel_attention',
    'prefix_attention',
    'toeplitz_matmul',
]
