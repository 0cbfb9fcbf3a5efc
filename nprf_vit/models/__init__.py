from .decoder import PixelDecoder
from .kernel_deit import KernelVisionTransformer
from .pixel import PixelTransformer

__all__ = ['KernelVisionTransformer', 'PixelDecoder', 'PixelTransformer']
