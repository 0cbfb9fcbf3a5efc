"""What `KernelAttention` asks of its arguments, and the grid that it reads from them.

B batch, H×W grid or N tokens (N = H·W), P prefix tokens, L tokens of a context, C channels.
"""

import torch

from nprf_vit.ops.features import FEATURE_MAPS

from .rel_pos import RelPosBias

KERNELS = (*FEATURE_MAPS, 'softmax')


def check_kernel(kernel: str, feature_dim: int = 1) -> None:
    """Raise for an unknown kernel, or for a number of features below 1."""
    if not isinstance(feature_dim, int) or feature_dim < 1:
        raise ValueError(f'feature_dim {feature_dim!r}: expected a whole number above 0')
    known = (*FEATURE_MAPS, 'softmax')  # not KERNELS: a feature map may have been added since
    if kernel not in known:
        raise ValueError(f'unknown kernel {kernel!r}: expected one of {", ".join(known)}')


def check_context(x: torch.Tensor, context: torch.Tensor, has_bias: bool, causal: bool) -> None:
    """Raise where tokens x cannot attend to those of a context."""
    alike = x.shape[0] == context.shape[0] and x.shape[-1] == context.shape[-1]
    if x.ndim not in (3, 4) or context.ndim not in (3, 4) or not alike:
        raise ValueError(
            f'context {tuple(context.shape)} beside x {tuple(x.shape)}: expected (B, L, C) or (B, H, W, C) with '
            'the same batch and channels'
        )
    if has_bias:
        raise ValueError('a relative position bias is about offsets within one sequence: a context has none')
    if causal:
        raise ValueError('causal attention is about the order within one sequence: a context has none')


def grid_of(x: torch.Tensor, rel_pos_bias: RelPosBias | None, given: tuple[int, int] | None = None) -> tuple[int, ...]:
    """(H, W) of a grid, or (N,) of a sequence; a sequence under a 2-D bias of the layer's own is that bias's grid."""
    prefix = getattr(rel_pos_bias, 'num_prefix_tokens', 0)
    if x.ndim == 4 and not prefix:
        return tuple(x.shape[1:3])
    if x.ndim != 3:
        which = f'(B, {prefix}+N, C), {prefix} tokens before those of the grid' if prefix else '(B, N, C)'
        expected = which if prefix else f'(B, H, W, C) or {which}'
        raise ValueError(f'expected {expected}, got {tuple(x.shape)}')
    if given is not None:
        return tuple(given)
    if rel_pos_bias is not None and len(rel_pos_bias.grid_size) == 2:
        h, w = rel_pos_bias.grid_size
        if h * w != x.shape[1] - prefix:
            instead = 'pass grid_size' if prefix else 'pass (B, H, W, C)'
            raise ValueError(f'{x.shape[1] - prefix} tokens do not fill the {h}x{w} grid of the bias: {instead}')
        return (h, w)
    return (x.shape[1] - prefix,)
