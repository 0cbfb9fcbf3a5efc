"""Which tokens may be attended to, in the shapes that people pass it in.

B batch, N tokens, H×W grid (N = H·W).
"""

from collections.abc import Sequence

import torch

from nprf_vit.ops.checks import has_values

_HIDDEN = -1e4  # what is added to the score of a key that nobody should see, in half precision


def as_key_mask(mask: torch.Tensor | None, shape: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """A mask of tokens as (B, N) of bool, False for those that nobody attends to; None stays None.

    Args:
        mask: (B, N) or (B, H, W) of bool, or (B, 1, 1, N), of bool or as timm's helpers make it: 0, and the most
            negative number of its dtype for padding.
        shape: (B, N).
        device: Of the tokens.
    """
    if mask is None:
        return None
    b, n = shape
    wanted = f'expected ({b}, {n}), ({b}, H, W) with H·W = {n}, or ({b}, 1, 1, {n}) of bool, False for padding'
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f'a mask of tokens must be a tensor, got {type(mask).__name__}: {wanted}')
    flat = mask[:, 0, 0] if mask.dim() == 4 and mask.shape[1:3] == (1, 1) else mask
    flat = flat.flatten(1) if flat.dim() == 3 else flat
    if tuple(flat.shape) != (b, n):
        if mask.dim() >= 2 and mask.shape[-2:] == (n, n):
            raise ValueError(f'a mask {tuple(mask.shape)} between queries and keys is not supported: {wanted}')
        raise ValueError(f'a mask {tuple(mask.shape)} does not fit {b} x {n} tokens: {wanted}')
    if mask.device != device:
        raise ValueError(f'a mask of tokens is on {mask.device}, the tokens on {device}: expected one device')
    if mask.dim() == 4 and mask.is_floating_point():
        # added to scores: on a CPU look whether it hides or shifts; a GPU would have to stop for that
        if mask.device.type == 'cpu' and has_values(mask) and not _hides(flat).all():
            raise ValueError(f'a mask that is added to scores may be 0 or below {_HIDDEN:g}: {wanted}')
        return flat == 0
    if mask.dtype != torch.bool:
        raise ValueError(f'a mask of tokens must be of bool, got {mask.dtype}: {wanted}')
    return flat


def _hides(mask: torch.Tensor) -> torch.Tensor:
    return (mask == 0) | (mask <= _HIDDEN)
