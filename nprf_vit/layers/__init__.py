from nprf_vit.ops.offsets import expand_table

from .attention import KernelAttention
from .attention_checks import KERNELS
from .block import KernelBlock
from .conv_patch_embed import ConvPatchEmbed
from .exportable import set_exportable
from .prefix_bias import PrefixRelPosBias
from .rel_pos import RelPosBias, resize_table

__all__ = [
    'KERNELS',
    'ConvPatchEmbed',
    'KernelAttention',
    'KernelBlock',
    'PrefixRelPosBias',
    'RelPosBias',
    'expand_table',
    'resize_table',
    'set_exportable',
]
