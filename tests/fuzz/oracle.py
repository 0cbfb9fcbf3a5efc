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
    """Where each pair of tokens finds its bias: an entry of the table, or far (index -1)."""

    index: np.ndarray  # N, N: queries are rows
    size: int

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
                index[i, j] = np.where(inside, y * cols + x, -1)
        return Table(index, rows * cols)

    @staticmethod
    def between_cells(n: int, grid: tuple[int, int], cells: tuple[int, int]) -> Table:
        y, x = np.divmod(np.arange(n), grid[1])
        # floats: sizes are small, and a centre on a border is a half that they hold exactly
        row, col = (np.floor((p + 0.5) * c / s + 1e-9).astype(int) for p, c, s in zip((y, x), cells, grid))
        dy, dx = row[None, :] - row[:, None], col[None, :] - col[:, None]
        width = 2 * cells[1] - 1
        return Table((dy + cells[0] - 1) * width + dx + cells[1] - 1, (2 * cells[0] - 1) * width)

    def gather(self, bias: np.ndarray, far: np.ndarray | None) -> np.ndarray:
        """(K, ...) -> (K, N, N)"""
        beyond = np.zeros(len(bias)) if far is None else far
        flat = np.concatenate([bias.reshape(len(bias), -1), beyond[:, None]], axis=1)
        return flat[:, self.index]

    def scatter(self, pairs: np.ndarray) -> np.ndarray:
        """Sums (K, N, N) over pairs of equal offset: (K, entries + 1), the last for far."""
        index = np.where(self.index < 0, self.size, self.index).ravel()
        return np.stack([np.bincount(index, x.ravel(), self.size + 1) for x in pairs])


@dataclass
class Result:
    """Named arrays, and beside each the sum of the absolute values of its terms."""

    values: dict[str, np.ndarray]
    scales: dict[str, np.ndarray]
    empty: np.ndarray  # B, K, N: rows that see no key with a weight


def attention(phi_q, phi_k, v, bias, far, grid_size, causal, g, cells=None) -> Result:
    """Output z and, for the cotangent g, the gradients of phi_q, phi_k, v, bias and far (positive features)."""
    scores = np.einsum('bkim,bkjm->bkij', phi_q, phi_k)  # B, K, N, N
    n = v.shape[2]
    table = None if bias is None else Table.build(bias.shape[1:], n, grid_size, cells)
    log_c = np.zeros((v.shape[1], n, n)) if bias is None else table.gather(bias, far)  # K, N, N
    if causal:
        log_c = np.where(np.arange(n)[None, :] > np.arange(n)[:, None], -np.inf, log_c)
    with np.errstate(divide='ignore', over='ignore', invalid='ignore', under='ignore'):
        return _attention(phi_q, phi_k, v, np.log(scores), log_c, table, bias, far, g)


def weights(log_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of e^x divided by their sums, the logarithms of those sums (..., N, 1), and which rows are empty."""
    top = log_scores.max(-1, keepdims=True)
    empty = top == -np.inf
    top = np.where(empty, 0.0, top)
    exp = np.exp(log_scores - top)
    total = np.where(empty, 1.0, exp.sum(-1, keepdims=True))
    return exp / total, np.log(total) + top, empty[..., 0]


def _attention(phi_q, phi_k, v, log_s, log_c, table, bias, far, g) -> Result:
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
        if bias is not None:
            by_offset = table.scatter((a * weight).sum(0))  # K, entries + 1
            result['bias'] = by_offset[:, :-1].reshape(bias.shape)
            if far is not None:
                result['far'] = by_offset[:, -1]
    return Result(values, scales, empty)
