"""`kernel_attention` and `prefix_attention` in plain operators, by the cheapest of four exact algorithms.

No opaque op, no look at values, no write into memory that something else reads: what `torch.export`, ONNX, converters,
`torch.func` and a second derivative ask for. docs/export.md.

# B batch, K heads, P prefix tokens, N tokens, M features, D head dim, E = D+1, H×W grid (N = H·W)
"""

from typing import Any

import torch

from ..backends.interface import Case, Grid
from ..backends.linear import with_ones
from ..bias import Bias, PrefixBias
from ..key_mask import hide_blind_rows, hide_keys
from ..precision import without_enabled_autocast
from . import cells as cell_products
from . import dense, linear, window
from .interface import Algorithm, Call, row_top, weight

# Those that grow with N come first: of sizes that are symbols nothing is compared.
ALGORITHMS: tuple[Algorithm, ...] = tuple(m.ALGORITHM for m in (linear, cell_products, window, dense))


def plain_attention(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    far: torch.Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    cells: tuple[int, int] | int | None = None,
    causal: bool = False,
    key_mask: torch.Tensor | None = None,
    positive: bool = True,
) -> torch.Tensor:
    """`nprf_vit.ops.kernel_attention` in plain operators, which autograd differentiates as often as asked.

    Multiply-adds per head and batch item, and what is stored, by the bias:

    | bias | algorithm | multiply-adds | numbers stored |
    |---|---|---|---|
    | none | linear, causal too | 2N·M(D+1) | N(M+D) |
    | between g cells | cells | (2N + g²)·M(D+1) | N(M+D) + g² |
    | constant beyond ±R, ±S | window, causal too | N·(2.5R)(2.5S)(M+D+1) + 2N·M(D+1) | N·(2.5S)·R/2 + N(M+D) |
    | any | dense, causal too | N²(M+D+1) | N² |

    Of those that serve a bias the cheapest is taken, or while sizes are symbols of an exported program the first. Sums
    run in float32, or float64 for float64 features. Each row's largest visible bias is taken out before exp, so biases
    of ±80 lose nothing. What the op does by looking at values is not done: products of features that float32 cannot
    hold are not repeated in float64, keys of zero features that no mask names count in row maxima, and NaN in one
    causal token may reach earlier ones.

    Args:
        phi_q, phi_k, v, bias, far, grid_size, cells, causal, key_mask, positive: As `kernel_attention` has checked
            them; see there.

    Returns:
        (B, K, N, D) in v's dtype; zeros for a query that sees no key.
    """
    dtype = torch.promote_types(phi_q.dtype, torch.float32)
    grid = _grid(grid_size, phi_q.shape[2])
    with without_enabled_autocast(v):
        phi_q, phi_k, values = _prepare(phi_q.to(dtype), phi_k.to(dtype), v.to(dtype), causal, key_mask)
        upright = _upright(bias, far, grid_size, cells, dtype)
        call = Call(phi_q, phi_k, with_ones(values), upright, grid, causal, key_mask)
        z = _quotient(choose(call).sums(call).sums, positive).to(v.dtype)
    return z if key_mask is None else hide_blind_rows(z, key_mask, causal)


def plain_prefix_attention(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    prefix: PrefixBias,
    bias: torch.Tensor | None = None,
    far: torch.Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    cells: tuple[int, int] | int | None = None,
    key_mask: torch.Tensor | None = None,
    positive: bool = True,
) -> torch.Tensor:
    """`nprf_vit.ops.prefix_attention` in plain operators: the grid's sums as above, and P dense columns and rows.

    Args:
        phi_q, phi_k, v, prefix, bias, far, grid_size, cells, positive: As there.
        key_mask: (B, P+N) of bool, False for keys that are not attended to.
    """
    dtype = torch.promote_types(phi_q.dtype, torch.float32)
    p = prefix.prefix_to_prefix.shape[-1]
    grid = _grid(grid_size, phi_q.shape[2] - p)
    with without_enabled_autocast(v):
        of_tokens, of_prefix, among = (x.to(dtype) for x in prefix)
        phi_q, phi_k, values = _prepare(phi_q.to(dtype), phi_k.to(dtype), v.to(dtype), False, key_mask)
        values = with_ones(values)
        columns, on_grid = (phi_k[:, :, :p], values[:, :, :p]), (phi_k[:, :, p:], values[:, :, p:])
        upright = _upright(bias, far, grid_size, cells, dtype)
        others = _seen(of_tokens[:, None], key_mask, p).amax(-1)  # K, 1 or B, K, 1
        mask = None if key_mask is None else key_mask[:, p:]
        call = Call(phi_q[:, :, p:], *on_grid, upright, grid, False, mask, others)
        sums, top = choose(call).sums(call)
        sums = sums + _columns(call.phi_q, *columns, of_tokens[:, None], top)
        own = phi_q[:, :, :p]  # B, K, P, M
        of_grid = of_prefix if mask is None else of_prefix.masked_fill(~mask.any(1)[:, None, None], -torch.inf)
        top = row_top(of_grid, _seen(among, key_mask, p).amax(-1))  # K, P or B, K, P
        own_sums = linear.ALGORITHM.sums(Call(own, *on_grid, None, (1, p))).sums * weight(of_prefix, top)[..., None]
        own_sums = own_sums + _columns(own, *columns, among, top)
        z = _quotient(torch.cat([own_sums, sums], dim=2), positive).to(v.dtype)
    return z if key_mask is None else hide_blind_rows(z, key_mask, False)


def choose(call: Call) -> Algorithm:
    """The cheapest algorithm that serves a call; the first where sizes are symbols, whose cost nobody knows."""
    case = Case.of(call.phi_q, call.v, call.bias, call.grid, call.causal, True)
    case = case._replace(d=case.d - 1)  # the column of ones
    able = [algorithm for algorithm in ALGORITHMS if algorithm.serves(case)]
    sizes = (*case.grid, *(case.cells or ()))
    return able[0] if any(not isinstance(s, int) for s in sizes) else min(able, key=lambda a: a.cost(case))


def _seen(bias: torch.Tensor, key_mask: torch.Tensor | None, p: int) -> torch.Tensor:
    """Biases (K, queries, P) of the first P keys, or (B, K, queries, P) with -inf for those that are masked."""
    return bias if key_mask is None else bias.masked_fill(~key_mask[:, None, None, :p], -torch.inf)


def _columns(
    phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, top: torch.Tensor
) -> torch.Tensor:
    """Σ over P keys of e^{b-t} φq_i·φk_p [v_p, 1], (B, K, queries, E), for biases (K, 1 or queries, P)."""
    return (phi_q @ phi_k.transpose(-1, -2) * weight(bias, top[..., None])) @ v


def _prepare(
    phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, causal: bool, key_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features and values without masked keys, features scaled so that no product of two is out of range.

    Factors of a query, and of all keys of a head, cancel; a causal query may not know the largest of later keys.
    """
    if key_mask is not None:
        phi_k, v = hide_keys(phi_k, key_mask), hide_keys(v, key_mask)
    phi_q = phi_q / _largest(phi_q, (-1,))
    return phi_q, phi_k if causal else phi_k / _largest(phi_k, (-1, -2)), v


def _largest(phi: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    size = phi.detach().abs().amax(dims, keepdim=True)
    return torch.where(size > 0, size, 1.0)


def _quotient(sums: torch.Tensor, positive: bool) -> torch.Tensor:
    """Numerators over denominators, (B, K, N, D); zero, without a gradient, where no key has any weight."""
    num, den = sums[..., :-1], sums[..., -1:]
    blind = den <= torch.finfo(den.dtype).tiny if positive else den == 0
    return torch.where(blind, 0.0, num) / torch.where(blind, 1.0, den)


def _grid(grid_size: tuple[int, int] | None, n: int) -> Grid:
    """(H, W), (1, N) for a sequence; a size that `torch.jit.trace` shows as a tensor is a number of its graph."""
    height, width = grid_size or (1, n)
    return _number(height), _number(width)


def _number(size: Any) -> int:
    return size if isinstance(size, torch.SymInt) else int(size)


def _upright(
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    grid_size: tuple[int, int] | None,
    cells: tuple[int, int] | int | None,
    dtype: torch.dtype,
) -> Bias | None:
    """The bias with a table (K, ·, ·), that of a sequence as one row, in the sums' dtype."""
    if bias is None:
        return None
    table = bias.to(dtype) if grid_size is not None else bias.to(dtype)[:, None]
    between = None
    if cells is not None:
        rows, cols = cells if isinstance(cells, (tuple, list)) else (1, cells)
        between = _number(rows), _number(cols)
    return Bias(table, None if far is None else far.to(dtype), between)
