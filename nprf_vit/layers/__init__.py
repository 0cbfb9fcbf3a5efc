from nprf_vit.ops.offsets import expand_table

from .attention import KERNELS, KernelAttention
from .block import KernelBlock
from .exportable import set_exportable
from .prefix_bias import PrefixRelPosBias
from .rel_pos import RelPosBias, resize_table

__all__ = [
    'KERNELS',
    'KernelAttention',
    'KernelBlock',
    'PrefixRelPosBias',
    'RelPosBias',
    'expand_table',
    'resize_table',
    'set_exportable',
]
