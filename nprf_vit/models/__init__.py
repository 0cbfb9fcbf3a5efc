from . import nprf_deit  # registers the entry points
from .kernel_deit import KernelVisionTransformer
from .pixel import PixelTransformer
from .pixel_generation import PixelDecoder

__all__ = ['KernelVisionTransformer', 'PixelDecoder', 'PixelTransformer', 'nprf_deit']
