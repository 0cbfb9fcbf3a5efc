"""What a relative position bias is on its way from a layer to an algorithm.

# K heads, N tokens, H×W grid (N = H·W), h×w cells; a sequence is a 1×N grid inside the ops
"""

from typing import NamedTuple

import torch

from .offsets import extend_table, extend_table_backward


class Bias(NamedTuple):
    """A bias by offset, key minus query, zero offset at the centre."""

    table: torch.Tensor  # K, 2H-1, 2W-1 or K, 2N-1; beside far any odd-sized window
    far: torch.Tensor | None = None  # K: the bias of every offset outside the table
    cells: tuple[int, ...] | None = None  # (h, w) or (h,): the table is between these cells, K, 2h-1, 2w-1 or K, 2h-1


class DenseBias(NamedTuple):
    """A bias for every pair of tokens, which softmax attention adds to its scores."""

    matrix: torch.Tensor  # K, N, N


class PrefixBias(NamedTuple):
    """What P tokens before the grid, class and register tokens, have in place of offsets."""

    token_to_prefix: torch.Tensor  # K, P: of every query on the grid with each key before it
    prefix_to_token: torch.Tensor  # K, P: of each query before the grid with every key on it
    prefix_to_prefix: torch.Tensor  # K, P, P: queries are rows


class PrefixedBias(NamedTuple):
    """A bias of P tokens and the grid that follows them."""

    grid: Bias | None
    prefix: PrefixBias
    grid_size: tuple[int, ...]  # (H, W), or (N,) of a sequence


AnyBias = Bias | PrefixedBias | DenseBias  # what a layer may be given


class BiasGradients(NamedTuple):
    """Gradients of a `Bias`, field by field; None where there is none or nobody asks."""

    table: torch.Tensor | None = None
    far: torch.Tensor | None = None


def prefixed_matrix(matrix: torch.Tensor, prefix: PrefixBias) -> torch.Tensor:
    """The bias (K, P+N, P+N) of P tokens before a grid, given that between the tokens of the grid, (K, N, N)."""
    n = matrix.shape[-1]
    above = torch.cat([prefix.prefix_to_prefix, prefix.prefix_to_token[:, :, None].expand(-1, -1, n)], dim=2)
    below = torch.cat([prefix.token_to_prefix[:, None].expand(-1, n, -1), matrix], dim=2)
    return torch.cat([above, below], dim=1)


def whole_table(bias: Bias, grid: tuple[int, int]) -> torch.Tensor:
    """The bias of every offset on the grid, (K, 2H-1, 2W-1); one between larger cells has none."""
    assert bias.cells in (None, grid), 'a backend that reads offsets refuses cells'
    return bias.table if bias.far is None else extend_table(bias.table, bias.far, *grid)


def whole_table_backward(grad: torch.Tensor | None, bias: Bias, grid: tuple[int, int]) -> BiasGradients:
    """Gradients of table and far, given that of `whole_table`."""
    if grad is None or bias.far is None:
        return BiasGradients(grad)
    return BiasGradients(*extend_table_backward(grad, bias.table, *grid))
