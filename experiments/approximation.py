"""Error of random-feature attention against the norm of queries and keys (the paper's first figure, right).

python -m experiments.approximation            100 seeds, some minutes; writes to a new folder in output/
python -m experiments.approximation --quick    seconds; writes nothing unless --output says where

One query and 1024 keys of width 64, uniform on the sphere of radius R. A is the row of softmax weights, Â its estimate.
Then the variance of one score, predicted and measured, and the number of features that an error asks for; docs/math.md,
"Approximation", derives both.

# N keys, M features, D width
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.report import Report, options, save_figure
from nprf_vit.ops import draw_projection, feature_map, reference

D = 64
KINDS = ('prf', 'orf', 'sphere', 'trf')
PROJECTIONS = 1 << 20  # added to a seed: tokens and projections from one stream would be the same vectors
ERROR, FAILURE = 0.5, 0.1  # ‖A-Â‖₁ ≤ ERROR but for a share of FAILURE of the draws; two rows differ by 2 at most


@dataclass
class Size:
    """How much to measure."""

    radii: tuple[float, ...]
    features: tuple[int, ...]
    seeds: int
    keys: int
    draws: int  # of the variance
    most_features: int  # where the search for enough of them ends


FULL = Size((1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0), tuple(1 << i for i in range(2, 11)), 100, 1024, 1 << 20, 1 << 14)
QUICK = Size((1.0, 2.0), (4, 16), 3, 64, 1 << 10, 64)


def draw_tokens(radius: float, keys: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A query (1, 1, D) and keys (1, N, D), float64."""
    x = torch.randn(1, keys + 1, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = radius * F.normalize(x, dim=-1)
    return x[:, :1], x[:, 1:]


def row_error(radius: float, keys: int, kind: str, m: int, seed: int) -> float:
    """‖A-Â‖₁ of one draw of tokens and projections."""
    q, k = draw_tokens(radius, keys, seed)
    w = draw_projection(1, m, D, kind, torch.Generator().manual_seed(PROJECTIONS + seed))
    scores = feature_map(q, w, kind, 'query') @ feature_map(k, w, kind, 'key').transpose(-1, -2)  # 1, 1, N
    exact = (q @ k.transpose(-1, -2)).softmax(-1)
    return (exact - scores / scores.sum(-1, keepdim=True)).abs().sum().item()


def errors(size: Size, bar) -> list[dict]:
    """Quantiles over seeds; not means, for which one vanishing denominator of `trf` would decide."""
    rows = []
    for radius in size.radii:
        for kind in KINDS:
            for m in size.features:
                bar.set_description(f'R={radius}, {kind}, m={m}')
                found = torch.tensor([row_error(radius, size.keys, kind, m, seed) for seed in range(size.seeds)])
                low, median, high = found.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
                row = {'radius': radius, 'kind': kind, 'm': m, 'seeds': size.seeds}
                rows.append({**row, 'low': f'{low:.4g}', 'median': f'{median:.4g}', 'high': f'{high:.4g}'})
                bar.update()
    return rows


def relative_variance(q: torch.Tensor, k: torch.Tensor, kind: str) -> torch.Tensor:
    """m·Var[φ(q)·φ(k)] / e^{2q·k}: e^{‖q+k‖²} - 1 for prf and ½e^{‖q-k‖²}(1 - e^{-‖q-k‖²})² for trf, (1, N)."""
    if kind == 'prf':
        return (q + k).square().sum(-1).expm1()
    apart = (q - k).square().sum(-1)
    return 0.5 * apart.exp() * (1 - (-apart).exp()).square()


def measured_variance(q: torch.Tensor, k: torch.Tensor, kind: str, draws: int, shift: float) -> float:
    """The same from draws of w, for one key (1, 1, D).

    Plain draws (shift 0) hardly ever meet the w that make up the variance of prf at a large norm. Draws around
    shift·(q+k), weighted by the ratio of the densities, do: at 1.5 their relative variance is e^{‖q+k‖²/4} - 1 only.
    """
    centre = shift * (q + k)[:, 0]  # 1, D
    generator = torch.Generator().manual_seed(PROJECTIONS)
    w = torch.randn(1, draws, D, generator=generator, dtype=torch.float64) + centre[:, None]
    weight = (centre.square().sum() / 2 - w @ centre[0]).exp()  # 1, M: density around 0 over density around the centre
    if kind == 'trf':
        # sin·sin + cos·cos of each projection by itself
        waves = reference.features(q, w, kind) * reference.features(k, w, kind) * draws  # 1, 1, 2M
        one = waves.unflatten(-1, (2, -1)).sum(-2)[:, 0]  # 1, M
    else:
        one = (reference.log_features(q, w) + reference.log_features(k, w) + math.log(draws)).exp()[:, 0]  # 1, M
    second = (weight * one.square()).mean()
    return (second / (2 * (q * k).sum()).exp() - 1).item()


def variances(size: Size, bar) -> list[dict]:
    rows = []
    for radius in size.radii:
        q, k = draw_tokens(radius, 1, seed=0)
        for kind in ('prf', 'trf'):
            bar.set_description(f'R={radius}, variance of {kind}')
            row = {'radius': radius, 'kind': kind, 'predicted': f'{relative_variance(q, k, kind).item():.4g}'}
            row['plain_draws'] = f'{measured_variance(q, k, kind, size.draws, 0.0):.4g}'
            shifted = measured_variance(q, k, kind, size.draws, 1.5) if kind == 'prf' else None
            rows.append({**row, 'shifted_draws': '' if shifted is None else f'{shifted:.4g}', 'draws': size.draws})
            bar.update()
    return rows


def enough_features(mean_relative_variance: float) -> float:
    """m with which ‖A-Â‖₁ ≤ ERROR in all but a share of FAILURE of the draws: σ²(2+ε)²/(δε²), docs/math.md."""
    return mean_relative_variance * (2 + ERROR) ** 2 / (FAILURE * ERROR**2)


def enough_by_theorem_3(radius: float, keys: int) -> float:
    """The same by the paper's Theorem 3, n·e^{4R²}/(t²δ): each score right to a factor 1±t, so ‖A-Â‖₁ < 2t/(1-t)."""
    t = ERROR / (2 + ERROR)
    return keys * math.exp(4 * radius**2) / (t**2 * FAILURE)


def mean_relative_variance(radius: float, keys: int) -> float:
    """σ² = Σ_j A_j (e^{‖q+k_j‖²} - 1)."""
    q, k = draw_tokens(radius, keys, seed=0)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)[0]  # 1, N
    return (weights * relative_variance(q, k, 'prf')).sum().item()


def samples(size: Size, bar) -> list[dict]:
    """Features enough for ERROR and FAILURE with prf: by three bounds, and as found by doubling m."""
    rows, seeds = [], max(3, size.seeds // 4)
    for radius in size.radii:
        found = f'> {size.most_features}'
        m = 2
        while m <= size.most_features:
            bar.set_description(f'R={radius}, are {m} features enough?')
            failed = sum(row_error(radius, size.keys, 'prf', m, seed) > ERROR for seed in range(seeds))
            if failed <= FAILURE * seeds:
                found = m
                break
            m *= 2
        bar.update()
        row = {'radius': radius, 'any_tokens': f'{enough_features(math.expm1(4 * radius**2)):.3g}'}
        row['these_tokens'] = f'{enough_features(mean_relative_variance(radius, size.keys)):.3g}'
        row |= {'measured': found, 'seeds': seeds, 'theorem_3': f'{enough_by_theorem_3(radius, size.keys):.3g}'}
        rows.append(row)
    return rows


def plot(rows: list[dict], spread: list[dict], needed: list[dict], path: Path) -> None:
    """Error against R by m and by kind, then the variance, then the number of features."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout='constrained')
    (by_m, by_kind), (variance, number) = figure.subplots(2, 2)

    def curve(axis, kind, m, label):
        mine = [r for r in rows if r['kind'] == kind and r['m'] == m]
        radii, low, median, high = ([float(r[key]) for r in mine] for key in ('radius', 'low', 'median', 'high'))
        (line,) = axis.plot(radii, median, 'o-', ms=3, label=label)
        axis.fill_between(radii, low, high, color=line.get_color(), alpha=0.15)

    features = sorted({r['m'] for r in rows})
    for m in features[::2]:
        curve(by_m, 'prf', m, f'm={m}')
    by_m.set(title='prf: median and 10 to 90 % of seeds', ylim=(0, 2.05))
    middle = features[len(features) // 2]
    for kind in KINDS:
        curve(by_kind, kind, middle, kind)
    by_kind.set(title=f'm={middle}', yscale='log')
    for kind, color in (('prf', 'tab:blue'), ('trf', 'tab:red')):
        mine = [r for r in spread if r['kind'] == kind]
        radii = [r['radius'] for r in mine]
        variance.plot(radii, [float(r['predicted']) for r in mine], '-', color=color, label=f'{kind}, predicted')
        for key, marker in (('plain_draws', 'x'), ('shifted_draws', 'o')):
            points = [(r['radius'], float(r[key])) for r in mine if r[key]]
            if points:
                label = f'{kind}, {key.replace("_", " ")}'
                variance.plot(*zip(*points), marker, color=color, mfc='none', label=label)
    variance.set(title='m · variance of one score / score²', yscale='log')
    bounds = {
        'theorem_3': "the paper's Theorem 3, any tokens",
        'any_tokens': 'our bound, any tokens',
        'these_tokens': 'our bound, these tokens',
    }
    for key, label in bounds.items():
        number.plot([r['radius'] for r in needed], [float(r[key]) for r in needed], '-', label=label)
    found = [(r['radius'], r['measured']) for r in needed if isinstance(r['measured'], int)]
    number.plot([r for r, _ in found], [m for _, m in found], 'ko', label='measured')
    number.set(title=f'features for ‖A-Â‖₁ ≤ {ERROR} in {1 - FAILURE:.0%} of draws, prf', yscale='log')
    for axis in (by_m, by_kind):
        axis.set_ylabel('‖A-Â‖₁')
    for axis in (by_m, by_kind, variance, number):
        axis.set_xlabel('R')
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    args = options(__doc__).parse_args(argv)
    report = Report.of(args, 'approximation')
    size = QUICK if args.quick else FULL
    with tqdm(total=len(size.radii) * (len(KINDS) * len(size.features) + 3)) as bar:
        tables = {
            'approximation': errors(size, bar),
            'approximation_variance': variances(size, bar),
            'approximation_samples': samples(size, bar),
        }
    for name, rows in tables.items():
        report.table(rows, name.replace('_', ': '))
    report.save(tables, {'approximation': lambda path: plot(*tables.values(), path)})


if __name__ == '__main__':
    main()
