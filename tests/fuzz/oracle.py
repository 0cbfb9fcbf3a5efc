"""Attention and its gradients in float64, from the formulas: NumPy only, nothing of `nprf_vit`.

Every pair of tokens looks its bias up by its offset, weights are formed in logarithms, so that no bias is too steep,
and each result comes with the sum of the absolute values of its terms, which is what rounding is measured against.
"""

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W)
from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Table:
    """Where each pair of tokens finds its bias in one row of numbers: the table's entries, far, and a prefix's."""

    index: np.ndarray  # queries are rows
    size: int  # of the table
    prefix: int = 0  # tokens before the grid

    @staticmethod
    def build(shape: tuple[int, ...], n: int, grid_size: tuple[int, int] | None, cells=None) -> Table:
        index = np.empty((n, n), dtype=np.int64)
        width = n if grid_size is None else grid_size[1]
        if cells is not None:
            return Table.between_cells(n, grid_size or (1, n), (1, cells) if grid_size is None else cells)
        rows, cols = (1, *shape) if len(shape) == 1 else shape
        for i in range(n):
            for j in range(n) if n <= 8 else (np.arange(n),):
                dy, dx = j // width - i // width, j % width - i % width
                y, x = dy + rows // 2, dx + cols // 2
                inside = (y >= 0) & (y < rows) & (x >= 0) & (x < cols)
                index[i, j] = np.where(inside, y * cols + x, rows * cols)
        return Table(index, rows * cols)

    @staticmethod
    def between_cells(n: int, grid: tuple[int, int], cells: tuple[int, int]) -> Table:
        y, x = np.divmod(np.arange(n), grid[1])
        # floats: sizes are small, and a centre on a border is a half that they hold exactly
        row, col = (np.floor((p + 0.5) * c / s + 1e-9).astype(int) for p, c, s in zip((y, x), cells, grid))
        dy, dx = row[None, :] - row[:, None], col[None, :] - col[:, None]
        width = 2 * cells[1] - 1
        return Table((dy + cells[0] - 1) * width + dx + cells[1] - 1, (2 * cells[0] - 1) * width)

    @staticmethod
    def flat(n: int) -> Table:
        """No table: every pair has what is beyond it, zero."""
        return Table(np.zeros((n, n), dtype=np.int64), 0)

    def after(self, p: int) -> Table:
        """The same behind p tokens that have numbers of their own, in either direction and among themselves."""
        n, start = len(self.index), self.size + 1
        index = np.empty((p + n, p + n), dtype=np.int64)
        index[p:, p:] = self.index
        for i in range(p):
            index[p:, i], index[i, p:] = start + i, start + p + i
            for j in range(p):
                index[i, j] = start + 2 * p + i * p + j
        return Table(index, self.size, p)

    def gather(self, bias: np.ndarray | None, far: np.ndarray | None, prefix=(), heads: int = 0) -> np.ndarray:
        """(K, ...) -> (K, queries, keys); `prefix` has token_to_prefix, prefix_to_token and prefix_to_prefix."""
        heads = heads if bias is None else len(bias)
        parts = [np.zeros((heads, 0)) if bias is None else bias, np.zeros((heads, 1)) if far is None else far, *prefix]
        return np.concatenate([x.reshape(heads, -1) for x in parts], axis=1)[:, self.index]

    def scatter(self, pairs: np.ndarray) -> list[np.ndarray]:
        """Sums (K, queries, keys) over pairs with one bias: (K, ·) of the table, far and the three of a prefix."""
        p = self.prefix
        ends = np.cumsum([self.size, 1, p, p, p * p])
        sums = np.stack([np.bincount(self.index.ravel(), x.ravel(), ends[-1]) for x in pairs])
        return np.split(sums, ends[:-1], axis=1)


@dataclass
class Result:
    """Named arrays, and beside each the sum of the absolute values of its terms."""

    values: dict[str, np.ndarray]
    scales: dict[str, np.ndarray]
    empty: np.ndarray  # B, K, N: rows that see no key with a weight


PREFIX = ('token_to_prefix', 'prefix_to_token', 'prefix_to_prefix')


def attention(
    phi_q, phi_k, v, bias, far, grid_size, causal, g, cells=None, key_mask=None, token_to_prefix=None, **prefix
) -> Result:
    """Output z and, for the cotangent g, the gradients of phi_q, phi_k, v and all biases (positive features).

    Keys where `key_mask` (B, keys) is False do not exist; without a bias there may be more or fewer keys than queries.
    """
    if key_mask is not None:
        seen = key_mask[:, None, :, None]
        phi_k, v = np.where(seen, phi_k, 0.0), np.where(seen, v, 0.0)
    scores = np.einsum('bkim,bkjm->bkij', phi_q, phi_k)  # B, K, queries, keys
    heads, (n, keys) = v.shape[1], scores.shape[2:]
    prefix = {} if token_to_prefix is None else {'token_to_prefix': token_to_prefix} | prefix
    p = token_to_prefix.shape[1] if prefix else 0
    table, log_c = None, np.zeros((heads, n, keys))
    if bias is not None or prefix:
        table = Table.flat(n - p) if bias is None else Table.build(bias.shape[1:], n - p, grid_size, cells)
        table = table.after(p) if prefix else table
        log_c = table.gather(bias, far, [prefix[name] for name in PREFIX] if prefix else (), heads)
    if causal:
        log_c = np.where(np.arange(n)[None, :] > np.arange(n)[:, None], -np.inf, log_c)
    biases = {'bias': bias, 'far': far} | {name: prefix.get(name) for name in PREFIX}
    with np.errstate(divide='ignore', over='ignore', invalid='ignore', under='ignore'):
        result = _attention(phi_q, phi_k, v, np.log(scores), log_c, table, biases, g)
    if key_mask is not None:
        for arrays in (result.values, result.scales):
            arrays.update({name: np.where(seen, arrays[name], 0.0) for name in ('phi_k', 'v')})
    return result


def weights(log_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of e^x divided by their sums, the logarithms of those sums (..., N, 1), and which rows are empty."""
    top = log_scores.max(-1, keepdims=True)
    empty = top == -np.inf
    top = np.where(empty, 0.0, top)
    exp = np.exp(log_scores - top)
    total = np.where(empty, 1.0, exp.sum(-1, keepdims=True))
    return exp / total, np.log(total) + top, empty[..., 0]


def _attention(phi_q, phi_k, v, log_s, log_c, table, biases, g) -> Result:
    a, log_den, empty = weights(log_s + log_c)  # B, K, N, N
    z, z_abs = a @ v, a @ abs(v)
    # c_ij/den_i: what a key of zero features would count for, hence not a_ij/S_ij
    c = np.where(empty[..., None], 0.0, np.exp(log_c - log_den))
    # p_ij = g_i·(v_j - z_i)
    p = np.einsum('bkid,bkjd->bkij', g, v) - (g * z).sum(-1)[..., None]
    p_abs = np.einsum('bkid,bkjd->bkij', abs(g), abs(v)) + (abs(g) * z_abs).sum(-1)[..., None]
    values, scales = {'z': z}, {'z': z_abs}
    for result, weight, cotangent in ((values, p, g), (scales, p_abs, abs(g))):
        cp = np.where(c == 0, 0.0, c * weight)
        result['phi_q'] = cp @ phi_k
        result['phi_k'] = np.swapaxes(cp, -1, -2) @ phi_q
        result['v'] = np.swapaxes(a, -1, -2) @ cotangent
        if table is not None:
            sums = table.scatter((a * weight).sum(0))
            for (name, parameter), total in zip(biases.items(), sums):
                if parameter is not None:
                    result[name] = total.reshape(parameter.shape)
    return Result(values, scales, empty)
