from .kernel_deit import KernelVisionTransformer

__all__ = ['KernelVisionTransformer']
