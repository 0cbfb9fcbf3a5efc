"""Relative position bias with tokens before the grid, such as class and register tokens, which have no offsets.

K heads, P prefix tokens, N tokens on a grid or along a sequence.
"""

from collections.abc import Sequence

import torch
from timm.layers import register_notrace_module, trunc_normal_
from torch import nn

from nprf_vit.ops.bias import AnyBias, Bias, DenseBias, PrefixBias, PrefixedBias, prefixed_matrix

from .rel_pos import RelPosBias
from .tracing import keep_whole


@register_notrace_module
class PrefixRelPosBias(RelPosBias):
    """A `RelPosBias`, and for each of P tokens before its grid a learned number in either direction, as BEiT has.

    Args:
        grid_size: As in `RelPosBias`, and so the next three.
        num_heads: Number of attention heads.
        dense: Whether to hand over the whole matrix.
        extend: What the table does on another grid.
        num_prefix_tokens: P.

    Attributes:
        token_to_prefix: (K, P) of every query on the grid with each key before it.
        prefix_to_token: (K, P) of each query before the grid with every key on it.
        prefix_to_prefix: (K, P, P), queries as rows.
    """

    def __init__(
        self,
        grid_size: Sequence[int],
        num_heads: int,
        dense: bool = False,
        extend: str = 'interpolate',
        num_prefix_tokens: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_prefix_tokens < 1:
            raise ValueError(f'num_prefix_tokens {num_prefix_tokens}: expected at least 1, or a RelPosBias')
        super().__init__(grid_size, num_heads, dense, extend, device=device, dtype=dtype)
        self.num_prefix_tokens = p = num_prefix_tokens
        self.token_to_prefix = nn.Parameter(torch.empty(num_heads, p, device=device, dtype=dtype))
        self.prefix_to_token = nn.Parameter(torch.empty(num_heads, p, device=device, dtype=dtype))
        self.prefix_to_prefix = nn.Parameter(torch.empty(num_heads, p, p, device=device, dtype=dtype))
        self._reset_prefix()

    def reset_parameters(self) -> None:
        """Draw the table as `RelPosBias` does, and the other biases likewise."""
        super().reset_parameters()
        if 'prefix_to_prefix' in self._parameters:  # not while the table alone is being made
            self._reset_prefix()

    def _reset_prefix(self) -> None:
        for x in (self.token_to_prefix, self.prefix_to_token, self.prefix_to_prefix):
            trunc_normal_(x, std=0.02)

    @keep_whole
    def forward(self, grid_size: Sequence[int] | None = None, causal: bool = False) -> AnyBias:
        """The bias on a grid and of the tokens before it; when dense, the matrix (K, P+N, P+N)."""
        bias = super().forward(grid_size, causal)
        prefix = PrefixBias(self.token_to_prefix, self.prefix_to_token, self.prefix_to_prefix)
        if isinstance(bias, DenseBias):
            return DenseBias(prefixed_matrix(bias.matrix, prefix))
        assert isinstance(bias, Bias)
        return PrefixedBias(bias, prefix, self.grid_size if grid_size is None else tuple(grid_size))

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, num_prefix_tokens={self.num_prefix_tokens}'


def make_rel_pos_bias(
    grid_size: Sequence[int],
    num_heads: int,
    dense: bool,
    extend: str,
    num_prefix_tokens: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> RelPosBias:
    """A `RelPosBias`, or with tokens before the grid one that has numbers for these too."""
    if not num_prefix_tokens:
        return RelPosBias(grid_size, num_heads, dense, extend, device=device, dtype=dtype)
    return PrefixRelPosBias(grid_size, num_heads, dense, extend, num_prefix_tokens, device=device, dtype=dtype)
