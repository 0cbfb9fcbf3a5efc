from .kernel_deit import KernelVisionTransformer
from .pixel import PixelTransformer
from .pixel_generation import PixelDecoder

__all__ = ['KernelVisionTransformer', 'PixelDecoder', 'PixelTransformer']
