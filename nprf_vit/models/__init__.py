from .kernel_deit import KernelVisionTransformer
from .pixel import PixelDecoder, PixelTransformer

__all__ = ['KernelVisionTransformer', 'PixelDecoder', 'PixelTransformer']
