"""Which patches of an image count: from a user's mask to keys, pixels and the pooled mean.

B batch, H×W grid (N = H·W patches), P prefix tokens, C channels.

fx keeps these functions whole and they take None for no mask, so a traced model takes a mask or none as well.
"""

import inspect

import torch
from timm.layers import PatchEmbed, global_pool_nlc, register_notrace_function
from torch import nn

from nprf_vit.layers.key_mask import as_key_mask


@torch.fx.wrap
@register_notrace_function
def token_mask(
    attn_mask: torch.Tensor | None, x: torch.Tensor, embed: PatchEmbed, prefix: int, drops: bool
) -> torch.Tensor | None:
    """A mask of the patches of images x, or of all tokens, as one of all tokens: (B, P+N) of bool."""
    if attn_mask is None:
        return None
    batch, (height, width) = x.shape[0], embed.dynamic_feat_size(x.shape[-2:])
    shape = tuple(attn_mask.shape) if isinstance(attn_mask, torch.Tensor) else ()
    if len(shape) == 3 and shape[1:] != (height, width) and shape[1] * shape[2] == height * width:
        raise ValueError(f'attn_mask {shape}: the patches are a {height}x{width} grid')
    if drops:
        raise ValueError('attn_mask needs every patch in its place: expected patch_drop_rate=0, or evaluation')
    return _of_all_tokens(attn_mask, batch, height * width, prefix, x.device)


@torch.fx.wrap
@register_notrace_function
def hide_pixels(x: torch.Tensor, mask: torch.Tensor | None, embed: PatchEmbed, prefix: int) -> torch.Tensor:
    """Images x with zeros in the patches that do not count: whatever they held, not even a NaN reaches a weight."""
    if mask is None:
        return x
    grid, (p, q) = embed.dynamic_feat_size(x.shape[-2:]), embed.patch_size
    seen = mask[:, prefix:].unflatten(1, grid)[:, None, :, None, :, None]  # B, 1, H, 1, W, 1
    seen = seen.expand(-1, 1, -1, p, -1, q).reshape(x.shape[0], 1, grid[0] * p, grid[1] * q)
    return x.masked_fill(~seen[..., : x.shape[-2], : x.shape[-1]], 0)


@torch.fx.wrap
@register_notrace_function
def pool_tokens(
    x: torch.Tensor,
    attn_mask: torch.Tensor | None,
    pool_type: str,
    prefix: int,
    include_prefix: bool,
    attn_pool: nn.Module | None,
) -> torch.Tensor:
    """Tokens (B, P+N, C) to (B, C) as timm's ViT pools them, over those that count; zeros where none does."""
    seen = None if attn_mask is None else _of_all_tokens(attn_mask, x.shape[0], x.shape[1] - prefix, prefix, x.device)
    if attn_pool is None and (seen is None or pool_type in ('', 'token')):
        return global_pool_nlc(x, pool_type, num_prefix_tokens=prefix, reduce_include_prefix=include_prefix)
    start = 0 if include_prefix else prefix
    x = x[:, start:]
    if seen is None:
        assert attn_pool is not None
        return attn_pool(x)
    seen = seen[:, start:]
    none = ~seen.any(1, keepdim=True)  # B, 1
    if attn_pool is not None:
        if 'attn_mask' not in inspect.signature(attn_pool.forward).parameters:
            raise ValueError(f'global_pool {pool_type!r} takes no mask: expected avg, max, avgmax, map or token')
        return attn_pool(x, attn_mask=(seen | none)[:, None, None]).masked_fill(none, 0)
    # as a mean does it: the sum of many tokens is beyond float16, and rounds by itself in bfloat16
    total = x.masked_fill(~seen[..., None], 0).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
    mean = (total / seen.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)
    if pool_type == 'avg':
        return mean
    top = x.masked_fill(~seen[..., None], -torch.inf).amax(1).masked_fill(none, 0)
    return top if pool_type == 'max' else 0.5 * (top + mean)


def _of_all_tokens(attn_mask: torch.Tensor, batch: int, n: int, prefix: int, device: torch.device) -> torch.Tensor:
    """A mask of N patches, whose prefix tokens are always seen, or of P+N tokens: (B, P+N)."""
    whole = isinstance(attn_mask, torch.Tensor) and attn_mask.dim() != 3 and attn_mask.shape[-1] == prefix + n
    mask = as_key_mask(attn_mask, (batch, prefix + n if whole else n), device)
    assert mask is not None
    return mask if whole or not prefix else torch.cat([mask.new_ones(batch, prefix), mask], dim=1)
