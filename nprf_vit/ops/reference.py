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
    keys: int,
    bias: Tensor | None,
    far: Tensor | None,
    grid_size: tuple[int, int] | None,
    causal: bool,
    cells: tuple[int, int] | int | None,
    like: Tensor,
) -> Tensor:
    """log c_{j-i}, (K or 1, N, keys): the bias, -inf above the diagonal where causal; else as many keys as wanted."""
    log_c = like.new_zeros(1, n, keys) if bias is None else dense_bias(bias, n, grid_size, far, cells)
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
    key_mask: Tensor | None = None,
) -> Tensor:
    """a_ij = c_{j-i} φ(q_i)·φ(k_j) / Σ_l c_{l-i} φ(q_i)·φ(k_l), (B, K, N, N); with `cells`, c_{cell(j)-cell(i)}.

    Each row's own largest bias is taken out before exp, so b = ±80 loses nothing. Features may be negative. With
    `key_mask` (B, N), keys that are False are left out of the matrix, item by item, and their weights are zero. Without
    a bias and causality there may be more or fewer keys than queries.
    """
    log_c = _log_position(phi_q.shape[-2], phi_k.shape[-2], bias, far, grid_size, causal, cells, phi_q)
    if key_mask is None:
        return _normalized_rows(phi_q, phi_k, log_c)
    items = []
    for q, k, keys in zip(phi_q, phi_k, _kept(key_mask)):
        rows = _normalized_rows(q, k[:, keys], log_c[:, :, keys])  # K, N, kept keys
        whole = rows.new_zeros(*rows.shape[:2], k.shape[1])
        items.append(whole.index_copy(2, keys, rows))
    return torch.stack(items)


def _normalized_rows(phi_q: Tensor, phi_k: Tensor, log_c: Tensor) -> Tensor:
    """exp(log_c) φ(q_i)·φ(k_j), each row divided by its sum; zeros where a row has no key."""
    if phi_k.shape[-2] == 0:
        return phi_q.new_zeros(*phi_q.shape[:-1], 0)
    top = log_c.detach().amax(-1, keepdim=True)
    blind = top == -math.inf  # every key of the row is left out
    c = (log_c - top.masked_fill(blind, 0)).exp()  # K, N, keys
    weights = torch.einsum('...im,...jm->...ij', phi_q, phi_k) * c
    return weights / weights.sum(-1, keepdim=True).masked_fill(blind, 1)


def _kept(key_mask: Tensor) -> list[Tensor]:
    """The keys of each batch item that may be attended to, by number."""
    return [torch.tensor([j for j, kept in enumerate(row.tolist()) if kept], dtype=torch.long) for row in key_mask]


def attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    far: Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    causal: bool = False,
    cells: tuple[int, int] | int | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """z_i = Σ_j a_ij v_j (Eq. 10), (B, K, N, D), with the whole matrix of weights in memory."""
    weights = attention_weights(phi_q, phi_k, bias, far, grid_size, causal, cells, key_mask)
    if key_mask is None:
        return torch.einsum('bkij,bkjd->bkid', weights, v)
    kept = zip(weights, v, _kept(key_mask))
    return torch.stack([torch.einsum('kij,kjd->kid', a[:, :, keys], x[:, keys]) for a, x, keys in kept])


def prefixed_bias(
    grid_bias: Tensor, token_to_prefix: Tensor, prefix_to_token: Tensor, prefix_to_prefix: Tensor
) -> Tensor:
    """The bias (K, P+N, P+N) of P tokens before a grid whose own is grid_bias (K, N, N); queries are rows.

    Args:
        grid_bias: As `dense_bias` gives it.
        token_to_prefix, prefix_to_token: (K, P), of tokens on the grid with keys before it, and the other way round.
        prefix_to_prefix: (K, P, P).
    """
    n, p = grid_bias.shape[-1], prefix_to_prefix.shape[-1]
    out = grid_bias.new_zeros(grid_bias.shape[0], p + n, p + n)
    for i in range(p + n):
        for j in range(p):
            out[:, i, j] = prefix_to_prefix[:, i, j] if i < p else token_to_prefix[:, j]
    for i in range(p):
        out[:, i, p:] = prefix_to_token[:, i, None]
    out[:, p:, p:] = grid_bias
    return out


def matrix_attention_weights(phi_q: Tensor, phi_k: Tensor, matrix: Tensor) -> Tensor:
    """`attention_weights` for a bias (K, N, N) between any two tokens."""
    c = (matrix - matrix.detach().amax(-1, keepdim=True)).exp()
    weights = torch.einsum('bkim,bkjm->bkij', phi_q, phi_k) * c  # B, K, N, N
    return weights / weights.sum(-1, keepdim=True)


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
    return (
        log_s + _log_position(log_q.shape[-2], log_k.shape[-2], bias, far, grid_size, causal, cells, log_q)
    ).softmax(-1)


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
