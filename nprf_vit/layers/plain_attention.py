"""The attention of a layer whose graph is to stand alone: checked as the ops check, computed in plain operators."""

from typing import Any

import torch

from nprf_vit.ops.attention import check_arguments
from nprf_vit.ops.bias import PrefixBias
from nprf_vit.ops.plain import plain_attention, plain_prefix_attention
from nprf_vit.ops.prefix import check_prefix


def checked_plain_attention(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    prefix: PrefixBias | None,
    causal: bool,
    key_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """`kernel_attention`, or with biases of P tokens before the grid `prefix_attention`, in plain operators.

    Args:
        phi_q, phi_k, v, prefix, causal, key_mask: As theirs.
        options: The arguments that both have: bias, far, grid_size, cells and positive.
    """
    if not torch.jit.is_tracing():  # where every comparison of sizes is a warning
        p = 0 if prefix is None else check_prefix(prefix, phi_q, v)
        bias, far, grid_size, cells = (options[name] for name in ('bias', 'far', 'grid_size', 'cells'))
        on_grid = phi_q[:, :, p:], phi_k[:, :, p:], v[:, :, p:]
        check_arguments(*on_grid, bias, far, grid_size, causal, cells)
    if prefix is None:
        return plain_attention(phi_q, phi_k, v, causal=causal, key_mask=key_mask, **options)
    return plain_prefix_attention(phi_q, phi_k, v, prefix, key_mask=key_mask, **options)
