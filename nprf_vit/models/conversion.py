"""Turn a trained softmax transformer into its kernelized twin, without retraining."""

import copy

import torch
from timm.layers import Attention
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

from nprf_vit.layers import KernelAttention
from nprf_vit.layers.attention_checks import check_kernel

from .kernel_deit import KernelVisionTransformer
from .rel_pos_conversion import has_rel_pos_twin, rel_pos_twin


def convert(
    model: VisionTransformer | Beit | VisionTransformerRelPos,
    kernel: str = 'prf',
    feature_dim: int = 32,
    seed: int = 0,
) -> VisionTransformer:
    """Copy a vision transformer with another attention kernel; all weights stay as they are.

    A model of this family keeps its `normalize` and its relative position bias. Any other timm VisionTransformer,
    with class and register tokens or without, gets unnormalized attention (the kernel that its softmax is) and no bias.
    timm's BEiT and vit_relpos models become models of this family: unnormalized attention, and their own biases.

    Args:
        model: The trained model, which is not changed.
        kernel: Kernel of the copy: 'prf', 'orf', 'sphere', 'trf', 'elu', or 'softmax' to go back.
        feature_dim: Number of random features per head.
        seed: Seed of the random projections; block i draws from (seed, i).

    Returns:
        A copy of the model, on the same device and in the same mode.
    """
    check_kernel(kernel, feature_dim)
    if has_rel_pos_twin(model):
        return rel_pos_twin(model, kernel, feature_dim, seed)
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f'cannot convert a {type(model).__name__}: expected a VisionTransformer of timm or nprf_vit, '
            'a Beit or a VisionTransformerRelPos'
        )
    model = copy.deepcopy(model)
    for i, block in enumerate(model.blocks):
        attn = getattr(block, 'attn', None)
        if type(attn) not in (Attention, KernelAttention):
            what = type(block if attn is None else attn).__name__
            raise ValueError(f'cannot convert blocks.{i}: {what} is not the attention of a plain ViT block')
        block.attn = _convert_attention(attn, f'blocks.{i}.attn', kernel, feature_dim, seed, depth=i)
    if isinstance(model, KernelVisionTransformer):
        model.kernel = kernel
        for bias in model.bias_modules().values():
            bias.dense = kernel == 'softmax'
    return model


def _convert_attention(attn: nn.Module, name: str, kernel: str, feature_dim: int, seed: int, depth: int) -> nn.Module:
    """A KernelAttention around the layers of another attention module."""
    ours = isinstance(attn, KernelAttention)
    if getattr(attn, 'gate', None) is not None:
        raise ValueError(f'cannot convert {name}: KernelAttention has no output gate')
    if attn.attn_drop.p and kernel != 'softmax':
        raise ValueError(
            f'cannot convert {name}: attn_drop {attn.attn_drop.p} needs attention weights, '
            f'which kernel {kernel!r} never forms; set attn_drop.p to 0 first'
        )
    dim = attn.qkv.in_features
    if attn.proj.out_features != dim:
        raise ValueError(f'cannot convert {name}: it maps {dim} channels to {attn.proj.out_features}')
    with torch.device('meta'):  # a shell: the layers that have weights are taken over below
        new = KernelAttention(
            dim,
            attn.num_heads,
            kernel=kernel,
            normalize=attn.normalize if ours else False,
            feature_dim=feature_dim,
            causal=attn.causal if ours else False,
            attn_backend=attn.attn_backend if ours else 'auto',
            seed=seed,
            depth=depth,
            head_dim=attn.head_dim,
        )
    for child in ('qkv', 'q_norm', 'k_norm', 'attn_drop', 'norm', 'proj', 'proj_drop'):
        setattr(new, child, getattr(attn, child))
    new.rel_pos_bias = attn.rel_pos_bias if ours else None
    if new.w is not None:
        weight = attn.qkv.weight
        dtype = attn.w.dtype if ours and attn.w is not None else torch.float32
        new.w = new.draw().to(device=weight.device, dtype=dtype)
    return new.train(attn.training)
