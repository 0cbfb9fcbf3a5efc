"""Vision transformers with kernelized attention and a relative position bias. Importing registers them with timm."""

from . import layers, models, ops
from .layers import KernelAttention, RelPosBias, set_exportable
from .models.conversion import convert
from .ops import feature_map, kernel_attention
from .version import __version__

__all__ = [
    'KernelAttention',
    'RelPosBias',
    '__version__',
    'convert',
    'feature_map',
    'kernel_attention',
    'layers',
    'models',
    'ops',
    'set_exportable',
]
