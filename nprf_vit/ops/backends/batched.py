"""The plain path on an accelerator: few large products over all heads at once, and nothing read on the host.

# B batch, K heads, N tokens, M features, E = D+1 value columns, H×W grid (N = H·W); G = B·K
# A chunk is g of the G heads × r rows of queries, against all keys: (g, r·W, N) scores.

Dense, and for a window much smaller than its grid by `batched_window`. Queries run backwards, so that c is read from
its table through positive strides (`toeplitz_view`). One scale per head: c = e^60 at its largest, above which float32
has room for sums of 1e9 and below which e^-147 is still a normal number. What lies further below the largest bias than
that counts as zero; on the CPU such rows are computed again in float64, which takes a look at the denominators.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..bias import Bias
from ..offsets import extend_table, extend_table_backward, toeplitz_view
from . import batched_tiles, batched_window, linear
from . import cells as cell_products
from .interface import Grid, Inputs

SCRATCH = 512 << 20  # bytes of scores alive at once: 2^27 in float32, in one array forward, in two backward


class _Chunk(NamedTuple):
    heads: slice  # of G
    rows: slice  # of H, backwards


def attend(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    grid: Grid,
    causal: bool,
    positive: bool,
    cells: Grid | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """z (B, K, N, D) and den (B, K, N), as `attend`'s; den is inf where no key has any weight."""
    plan = None if far is None else batched_tiles.plan(bias, grid, causal)
    if bias is None:
        num, den = linear.split(linear.product(phi_q, phi_k, linear.with_ones(v), causal))
    elif cells not in (None, grid):
        num, den = cell_products.forward(Inputs(phi_q, phi_k, v, Bias(bias, None, cells)), grid, causal, v.dtype)
    elif plan is not None:
        num, den = linear.split(batched_window.product(phi_q, phi_k, v, bias, far, plan, SCRATCH))
    else:
        table = bias if far is None else extend_table(bias, far, *grid)
        c, upright = _upright(_weights(table, causal), grid)
        num, den = linear.split(_product(phi_q, phi_k, linear.with_ones(v), c, upright))
    tiny = torch.finfo(den.dtype).tiny
    den = den.masked_fill(den <= tiny if positive else den == 0, torch.inf)
    return (num / den.unsqueeze(-1)).contiguous(), den.contiguous()


def attend_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    z: torch.Tensor,
    den: torch.Tensor,
    grad: torch.Tensor,
    grid: Grid,
    causal: bool,
    bias_grad: bool,
    cells: Grid | None = None,
    log_den_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of phi_q, phi_k, v, bias and far, or None; `log_den_grad` as in `attend_backward`."""
    scaled = grad / den.unsqueeze(-1)
    grad = torch.cat([scaled, -(scaled * z).sum(-1, keepdim=True)], dim=-1)  # B, K, N, E
    if log_den_grad is not None:
        grad[..., -1] += log_den_grad / den
    if bias is None:
        *grads, d_v = linear.product_backward(phi_q, phi_k, linear.with_ones(v), grad, causal)
        return *grads, d_v[..., :-1], None, None
    if cells not in (None, grid):
        inputs = Inputs(phi_q, phi_k, v, Bias(bias, None, cells))
        *grads, of_bias = cell_products.backward(inputs, grid, causal, v.dtype, grad, bias_grad)
        return *grads, of_bias.table, None
    plan = None if far is None else batched_tiles.plan(bias, grid, causal)
    if plan is not None:
        return batched_window.product_backward(phi_q, phi_k, v, bias, far, plan, SCRATCH, grad, bias_grad)
    table = bias if far is None else extend_table(bias, far, *grid)
    c, upright = _upright(_weights(table, causal), grid)
    values = linear.with_ones(v)
    d_q, d_k, d_v, d_bias = _product_backward(phi_q, phi_k, values, c, upright, grad, bias_grad)
    d_bias = d_bias if d_bias is None or upright == grid else d_bias.transpose(1, 2)
    d_far = None
    if d_bias is not None and far is not None:
        d_bias, d_far = extend_table_backward(d_bias, bias, *grid)
    return d_q, d_k, d_v[..., :-1].contiguous(), d_bias, d_far


def log_scale(
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    grid: Grid,
    cells: Grid | None = None,
) -> torch.Tensor:
    """The logarithm of what den of `attend` is to be multiplied by, as `interface.LogScale`."""
    if bias is None:
        return v.new_zeros(())
    if cells not in (None, grid):
        return cell_products.log_scale(Inputs(phi_k, phi_k, v, Bias(bias, None, cells)), grid, v.dtype)
    if far is None:
        table = bias
    else:
        plan = batched_tiles.plan(bias, grid, False)
        table = extend_table(bias, far, *grid) if plan is None else batched_window.near_table(bias, far, plan)
    return batched_window.log_scale(table)


def _weights(bias: torch.Tensor, causal: bool) -> torch.Tensor:
    """c (K, 2H-1, 2W-1) = exp(b - max b + 60), zero for later keys of a causal sequence."""
    if causal:
        future = torch.arange(bias.shape[2], device=bias.device) > bias.shape[2] // 2
        bias = bias.masked_fill(future, -torch.inf)
    return batched_window.scaled_exp(bias)


def _upright(c: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, Grid]:
    """A sequence as a grid of N rows, which chunks may divide."""
    return (c.transpose(1, 2).contiguous(), grid[::-1]) if grid[0] == 1 else (c, grid)


def _chunks(shape: torch.Size, itemsize: int, grid: Grid, arrays: int) -> Iterator[_Chunk]:
    """Heads of several batch items at once, or some heads of one, or rows of one head: as many as the scratch holds."""
    batch, heads, n, _ = shape
    height, width = grid
    budget = SCRATCH // (itemsize * arrays)
    for g in batched_tiles.head_groups(batch, heads, budget // (n * n)):
        rows = max(1, min(budget // ((g.stop - g.start) * width * n), height))
        for y in range(0, height, rows):
            yield _Chunk(g, slice(y, min(y + rows, height)))


def _view(c: torch.Tensor, chunk: _Chunk, grid: Grid) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Weights (heads, r, W, H, W) of a chunk, and the shape (items, heads, r, W, H, W) of its scores."""
    count, heads, rows = chunk.heads.stop - chunk.heads.start, c.shape[0], chunk.rows.stop - chunk.rows.start
    first = chunk.heads.start % heads
    table = c[first : first + min(count, heads)]
    view = toeplitz_view(table, (rows, grid[1]), grid, chunk.rows.start)
    return view, (-1, table.shape[0], rows, grid[1], *grid)


def _tokens(chunk: _Chunk, grid: Grid) -> slice:
    return slice(chunk.rows.start * grid[1], chunk.rows.stop * grid[1])


def _product(phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, c: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Σ_j c_{j-i} (φq_i·φk_j) v_j, (B, K, N, E)."""
    q, k, values = phi_q.flatten(0, 1).flip(1), phi_k.flatten(0, 1), v.flatten(0, 1)  # G, N, ·
    out = torch.empty_like(values)
    for chunk in _chunks(v.shape, v.dtype.itemsize, grid, 1):
        g, t = chunk.heads, _tokens(chunk, grid)
        scores = torch.bmm(q[g, t], k[g].transpose(1, 2))  # g, q, N
        view, shape = _view(c, chunk, grid)
        scores.view(shape).mul_(view)
        torch.bmm(scores, values[g], out=out[g, t])
        del scores  # before the next chunk's are made
    return out.flip(1).view(v.shape)


def _product_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    c: torch.Tensor,
    grid: Grid,
    grad: torch.Tensor,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of phi_q, phi_k and v, and of the bias in c = exp(b); scores are computed again."""
    q, g_out = phi_q.flatten(0, 1).flip(1), grad.flatten(0, 1).flip(1)  # G, N, ·
    k, values = phi_k.flatten(0, 1), v.flatten(0, 1)
    d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(values)
    d_bias = torch.zeros_like(c) if bias_grad else None
    for chunk in _chunks(v.shape, v.dtype.itemsize, grid, 2):
        g, t = chunk.heads, _tokens(chunk, grid)
        view, shape = _view(c, chunk, grid)
        scores = torch.bmm(q[g, t], k[g].transpose(1, 2))  # g, q, N
        scores.view(shape).mul_(view)
        d_v[g].baddbmm_(scores.transpose(1, 2), g_out[g, t])
        d_scores = torch.bmm(g_out[g, t], values[g].transpose(1, 2))
        if d_bias is not None:
            first, rows = g.start % c.shape[0], chunk.rows
            queries = rows.stop - rows.start, grid[1]
            part = batched_tiles.sum_offsets(scores.mul_(d_scores), queries, grid)  # g, r+H-1, 2W-1
            part = part.view(-1, view.shape[0], *part.shape[1:])  # items, heads, r+H-1, 2W-1
            part = part.sum(0) if part.shape[0] > 1 else part[0]
            d_bias[first : first + part.shape[0], rows.start : rows.start + part.shape[1]].add_(part)
        d_scores.view(shape).mul_(view)
        torch.bmm(d_scores, k[g], out=d_q[g, t])
        d_k[g].baddbmm_(d_scores.transpose(1, 2), q[g, t])
        del scores, d_scores
    return d_q.flip(1).view(phi_q.shape), d_k.view(phi_k.shape), d_v.view(v.shape), d_bias
