"""What timm notes about a model's input, so that a model resized after its creation is saved as it is.

timm keeps two records beside a model: its traits, among them the current image size, and the arguments that
`timm.create_model` would make it with again. `save_for_hf` writes both. timm 1.0.30 has neither: there the caller of
`save_for_hf` gives `model_args`.
"""

import torch
from torch import nn

try:
    from timm.models._input import get_pretrained_grid_size, update_model_args, update_model_input_size
except ImportError:  # timm 1.0.30
    update_model_input_size = None

__all__ = ['checkpoint_grid_size', 'record_input_size']


def record_input_size(model: nn.Module, patch_size: int | tuple[int, int] | None = None) -> None:
    """Note the current image size, and the patch size if it was changed; nothing where timm keeps no records."""
    if update_model_input_size is None:
        return
    update_model_input_size(model, model.patch_embed.img_size, patch_size=patch_size)
    resized = [bias.grid_size for bias in model.bias_modules().values() if bias.extend == 'interpolate']
    if resized and model._model_args.get('rel_pos_size') is not None:
        # the table that was asked for has been resized to the new grid, as every other one
        update_model_args(model, rel_pos_size=resized[0])


def checkpoint_grid_size(model: nn.Module, patch_weight: torch.Tensor | None, tokens: int) -> tuple[int, int] | None:
    """(H, W) of a checkpoint's position embedding from what it was saved with, if that has as many tokens."""
    if update_model_input_size is None:
        return None
    return get_pretrained_grid_size(model, patch_weight, tokens)
