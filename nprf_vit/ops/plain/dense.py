"""Any bias: (ΦqΦkᵀ ∘ C) [V, 1] with its N×N weights stored. O(N²(M+D)) time, O(N²) memory per head.

# B batch, K heads, N tokens, M features, E value columns
"""

import torch

from ..backends.interface import Case, Grid
from ..bias import Bias
from ..cell_grid import expand_cells
from ..offsets import expand_table, extend_table
from .interface import Algorithm, Call, Scaled, row_top, weight


def _sums(call: Call) -> Scaled:
    assert call.bias is not None  # `_serves`
    bias = _matrix(call.bias, call.grid)  # K, N, N
    if call.causal:
        future = torch.ones_like(bias[0], dtype=torch.bool).triu(1)
        bias = bias.masked_fill(future, -torch.inf)
    seen = bias.detach()
    if call.key_mask is not None:
        seen = seen.masked_fill(~call.key_mask[:, None, None, :], -torch.inf)  # B, K, N, N
    top = row_top(seen.amax(-1), call.others)  # K, N or B, K, N
    scores = call.phi_q @ call.phi_k.transpose(-1, -2)  # B, K, N, N
    return Scaled((scores * weight(bias, top[..., None])) @ call.v, top)


def _matrix(bias: Bias, grid: Grid) -> torch.Tensor:
    """The bias (K, N, N) of every key for every query."""
    if bias.cells is not None:
        return expand_cells(bias.table, bias.cells, grid)
    return expand_table(bias.table if bias.far is None else extend_table(bias.table, bias.far, *grid), grid)


def _serves(case: Case) -> bool:
    return case.has_bias


def _cost(case: Case) -> float:
    return float(case.n) ** 2 * (case.m + case.d + 1)


ALGORITHM = Algorithm('dense', _serves, _cost, _sums)
