"""What attention with a relative bias expresses and a dot product of width d cannot (the paper's Proposition 1).

python -m experiments.expressiveness            a 14x14 grid and a sequence, seconds; writes to a new folder in output/
python -m experiments.expressiveness --quick    smaller; writes nothing unless --output says where

softmax(B) = softmax(QKᵀ) exactly if B is QKᵀ plus a constant per row, hence of rank d+1 at most: a bias matrix of a
higher rank is out of reach for every Q and K. Sharper: with the row constants removed, B(I - 11ᵀ/N), the rank to
compare with is d; its singular values beyond the d-th are, by Eckart and Young, the least distance that any Q and K
leave, and the truncated decomposition is a Q and K that attains it.
Kernelized attention without a bias has a matrix of rank m at most, before any logarithm.

# N tokens, D head dim, M features
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.report import Report, options, save_figure
from nprf_vit.ops import draw_projection, feature_map, reference


@dataclass
class Target:
    """A bias table and the tokens it is for."""

    name: str
    n: int
    grid: tuple[int, int] | None
    table: Callable[[tuple[int, ...]], torch.Tensor]  # of the offsets along each axis

    def bias(self) -> torch.Tensor:
        """(2N-1,) or (2H-1, 2W-1), float64."""
        axes = [torch.arange(1 - s, s, dtype=torch.float64) for s in self.grid or (self.n,)]
        return self.table(torch.meshgrid(*axes, indexing='ij'))

    def matrix(self) -> torch.Tensor:
        """B (N, N): the bias of each pair."""
        return reference.dense_bias(self.bias().unsqueeze(0), self.n, self.grid)[0]


def normal(axes):
    return torch.randn(axes[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def as_initialised(axes):
    return 0.02 * normal(axes)


def distance(axes):
    return -sum(a.square() for a in axes).sqrt()


def squared_distance(axes):
    return -0.1 * sum(a.square() for a in axes)


def targets(side: int, n: int) -> list[Target]:
    grid = (side, side)
    return [
        Target(f'{side}x{side}, normal table', side**2, grid, normal),
        Target(f'{side}x{side}, as initialised (0.02)', side**2, grid, as_initialised),
        Target(f'{side}x{side}, minus the distance', side**2, grid, distance),
        Target(f'{side}x{side}, minus the squared distance', side**2, grid, squared_distance),
        Target(f'sequence of {n}, normal table', n, None, normal),
        Target(f'sequence of {n}, minus the distance', n, None, distance),
    ]


def rank(singular_values: torch.Tensor, size: int) -> int:
    """Singular values above what float64 leaves of an exact zero."""
    return int((singular_values > singular_values[0] * size * torch.finfo(torch.float64).eps).sum())


def centred(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix without the constants per row that softmax ignores."""
    return matrix - matrix.mean(-1, keepdim=True)


def dot_product_rows(target: Target, widths: list[int], bar) -> list[dict]:
    """For each width: the rank of the bias beside it, the least distance of logarithms, and what that does to A."""
    b = target.matrix()
    u, s, v = torch.linalg.svd(centred(b))
    full, plain = rank(s, target.n), rank(torch.linalg.svdvals(b), target.n)
    exact = b.softmax(-1)
    rows = []
    for d in widths:
        best = (u[:, :d] * s[:d]) @ v[:d]  # N, N: a product of Q (N, D) and Kᵀ
        rows.append(
            {
                'bias': target.name,
                'n': target.n,
                'd': d,
                'rank_of_bias': plain,
                'rank_centred': full,
                'expressible': 'no' if full > d else 'yes',
                'least_log_distance': f'{s[d:].square().sum().sqrt():.4g}',
                'share_of_log': f'{s[d:].norm() / s.norm():.4g}',
                'mean_row_error': f'{(exact - best.softmax(-1)).abs().sum(-1).mean():.4g}',
            }
        )
        bar.update()
    return rows


def kernel_rows(side: int, features: list[int], bar) -> list[dict]:
    """Rank of the attention matrix of normalized PRF attention, without a bias and with one."""
    n, d = side**2, 64
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, n, d, generator=generator, dtype=torch.float64)
    bias = torch.randn(1, 2 * side - 1, 2 * side - 1, generator=generator, dtype=torch.float64)
    rows = []
    for m in features:
        w = draw_projection(1, m, d)
        phi_q, phi_k = (feature_map(x, w, role=role, normalize=True) for x, role in ((q, 'query'), (k, 'key')))
        found = {'n': n, 'm': m}
        for key, table in (('rank_without_bias', None), ('rank_with_bias', bias)):
            a = reference.attention_weights(phi_q, phi_k, table, grid_size=(side, side))[0, 0]
            found[key] = rank(torch.linalg.svdvals(a), n)
        rows.append(found)
        bar.update()
    return rows


def plot(rows: list[dict], kernel: list[dict], path: Path) -> None:
    """What is left of each bias against the width of the dot product, and the ranks of kernelized attention."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout='constrained')
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(r['bias'] for r in rows):
        mine = [r for r in rows if r['bias'] == name]
        # exact zeros are rounding on a logarithmic axis: show them at its lower end
        values = [max(float(r['mean_row_error']), 1e-8) for r in mine]
        left.plot([r['d'] for r in mine], values, 'o-', ms=3, label=f'{name}, rank {mine[0]["rank_centred"]}')
    left.set(xscale='log', yscale='log', xlabel='width d of Q and K', ylabel='mean over rows of ‖A-Â‖₁')
    left.set_title('softmax(B) by the Q and K nearest in logarithms')
    m = [r['m'] for r in kernel]
    right.plot(m, [r['rank_without_bias'] for r in kernel], 'o-', label='without a bias')
    right.plot(m, [r['rank_with_bias'] for r in kernel], 's-', label='with a bias')
    right.set(xscale='log', xlabel='features m', ylabel=f'rank of the {kernel[0]["n"]}×{kernel[0]["n"]} matrix')
    right.set_title('kernelized attention')
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    args = options(__doc__).parse_args(argv)
    report = Report.of(args, 'expressiveness')
    side, length, widths = (4, 12, [1, 4, 11, 15]) if args.quick else (14, 256, [1, 4, 16, 32, 64, 128, 194, 195, 255])
    features = [2, 8] if args.quick else [4, 8, 16, 32, 64, 128, 256]
    chosen = targets(side, length)
    with tqdm(total=sum(len([d for d in widths if d < t.n]) for t in chosen) + len(features)) as bar:
        rows = [r for t in chosen for r in dot_product_rows(t, [d for d in widths if d < t.n], bar)]
        kernel = kernel_rows(side, features, bar)
    report.table(rows, 'dot products')
    report.table(kernel, 'kernelized attention')
    tables = {'expressiveness': rows, 'expressiveness_kernel': kernel}
    report.save(tables, {'expressiveness': lambda path: plot(rows, kernel, path)})


if __name__ == '__main__':
    main()
