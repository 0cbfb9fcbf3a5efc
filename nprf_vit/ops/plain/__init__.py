"""Kernelized attention in operators that every exporter and every transform of torch.func knows."""

from .attention import plain_attention, plain_prefix_attention

__all__ = ['plain_attention', 'plain_prefix_attention']
