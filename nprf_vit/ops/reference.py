"""Dense O(n²) oracles, written straight from the equations (docs/math.md). For tests, benchmarks and the doctor only.

They share nothing with the fast paths: positions are looked up one offset at a time in the table (never an FFT, never
a strided view), nothing is tiled, features have no stabiliser, and all work happens in the dtype given (tests give
float64).
"""

# B batch, N tokens, K heads, M features, D head dim, H×W grid (N = H·W)
from __future__ import annotations

import math

import torch
from torch import Tensor


def offsets(
    n: int, grid_size: tuple[int, int] | None = None, cells: tuple[int, int] | int | None = None
) -> list[Tensor]:
    """Key minus query position, (N, N) with queries as rows: [dy, dx] on a grid, [j-i] on a sequence.

    With `cells`, (h, w) or h, positions are those of the cells: row y of H is in row ⌊(y+½)h/H⌋ of h.
    """
    token = torch.arange(n)
    axes = [token] if grid_size is None else [token // grid_size[1], token % grid_size[1]]
    if cells is not None:
        sizes, counts = (grid_size or (n,)), ((cells,) if isinstance(cells, int) else tuple(cells))
        axes = [(2 * axis + 1) * count // (2 * size) for axis, size, count in zip(axes, sizes, counts)]
    return [axis[None, :] - axis[:, None] for axis in axes]


def dense_bias(
    bias: Tensor,
    n: int,
    grid_size: tuple[int, int] | None = None,
    far: Tensor | None = None,
    cells: tuple[int, int] | int | None = None,
) -> Tensor:
    """b_{j-i} for every query i and key j, (K, N, N), gathered from a table whose centre is the zero offset.

    Args:
        bias: (K, 2H-1, 2W-1) or (K, 2N-1); with `far` any odd sizes.
        n: Number of tokens.
        grid_size: (H, W), or None for a sequence.
        far: (K,), the bias of offsets that the table does not hold.
        cells: (h, w), or h for a sequence: the table is between cells, (K, 2h-1, 2w-1) or (K, 2h-1).
    """
    index = torch.zeros(n, n, dtype=torch.long)
    inside = torch.ones(n, n, dtype=torch.bool)
    for delta, size in zip(offsets(n, grid_size, cells), bias.shape[1:]):
        position = delta + size // 2
        inside &= (position >= 0) & (position < size)
        index = index * size + position.clamp(0, size - 1)
    if far is None and not inside.all():
        raise IndexError(f'table {tuple(bias.shape)} lacks offsets of {n} tokens on grid {grid_size}, and far is None')
    dense = bias.flatten(1)[:, index.flatten()].unflatten(1, (n, n))  # K, N, N
    return dense if far is None else torch.where(inside, dense, far[:, None, None])


def _log_position(
    n: int,
    bias: Tensor | None,
    far: Tensor | None,
    grid_size: tuple[int, int] | None,
    causal: bool,
    cells: tuple[int, int] | int | None,
    like: Tensor,
) -> Tensor:
    """log c_{j-i}, (K or 1, N, N): the bias, -inf above the diagonal where causal."""
    log_c = like.new_zeros(1, n, n) if bias is None else dense_bias(bias, n, grid_size, far, cells)
    if causal:
        log_c = log_c.masked_fill(offsets(n)[0] > 0, -math.inf)
    return log_c


def attention_weights(
    phi_q: Tensor,
    phi_k: Tensor,
    bias: Tensor | None = None,
    far: Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    causal: bool = False,
    cells: tuple[int, int] | int | None = None,
) -> Tensor:
    """a_ij = c_{j-i} φ(q_i)·φ(k_j) / Σ_l c_{l-i} φ(q_i)·φ(k_l), (B, K, N, N); with `cells`, c_{cell(j)-cell(i)}.

    Each row's own largest bias is taken out before exp, so b = ±80 loses nothing. Features may be negative.
    """
    log_c = _log_position(phi_q.shape[-2], bias, far, grid_size, causal, cells, phi_q)
    c = (log_c - log_c.detach().amax(-1, keepdim=True)).exp()  # K, N, N
    weights = torch.einsum('bkim,bkjm->bkij', phi_q, phi_k) * c  # B, K, N, N
    return weights / weights.sum(-1, keepdim=True)


def attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    far: Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    causal: bool = False,
    cells: tuple[int, int] | int | None = None,
) -> Tensor:
    """z_i = Σ_j a_ij v_j (Eq. 10), (B, K, N, D), with the whole matrix of weights in memory."""
    return torch.einsum('bkij,bkjd->bkid', attention_weights(phi_q, phi_k, bias, far, grid_size, causal, cells), v)


def log_attention_weights(
    log_q: Tensor,
    log_k: Tensor,
    bias: Tensor | None = None,
    far: Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    causal: bool = False,
    cells: tuple[int, int] | int | None = None,
) -> Tensor:
    """`attention_weights` from the logarithms of positive features, for features that no float could hold."""
    log_s = (log_q[..., :, None, :] + log_k[..., None, :, :]).logsumexp(-1)  # B, K, N, N
    return (log_s + _log_position(log_q.shape[-2], bias, far, grid_size, causal, cells, log_q)).softmax(-1)


def features(x: Tensor, w: Tensor | None = None, kind: str = 'prf') -> Tensor:
    """φ(x) without any stabiliser, (..., K, N, M); 2M features for 'trf' (sines first), D for 'elu'.

    Args:
        x: (..., K, N, D)
        w: (K, M, D), unused by 'elu'
    """
    if kind == 'trf':  # Eq. 4
        assert w is not None
        wx = torch.einsum('...knd,kmd->...knm', x, w)
        scale = (x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(w.shape[1])
        return scale * torch.cat([wx.sin(), wx.cos()], -1)
    return log_features(x, w, kind).exp()


def log_features(x: Tensor, w: Tensor | None = None, kind: str = 'prf') -> Tensor:
    """log φ(x) of the kinds that are positive: Eq. 5, or log(elu(x) + 1)."""
    if kind == 'elu':
        return torch.where(x > 0, x.clamp_min(0).log1p(), x)
    if kind not in ('prf', 'orf', 'sphere'):
        raise ValueError(f'no logarithm of kind {kind!r}: its features are not positive')
    assert w is not None
    wx = torch.einsum('...knd,kmd->...knm', x, w)
    return wx - x.square().sum(-1, keepdim=True) / 2 - math.log(w.shape[1]) / 2


def toeplitz_matmul(table: Tensor, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
    """y_i = Σ_j table_{j-i} x_j, (B, K, N, D), by the dense (block-)Toeplitz matrix."""
    return torch.einsum('kij,bkjd->bkid', dense_bias(table, x.shape[2], grid_size), x)
