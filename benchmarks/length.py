"""Cost of one head against the number of tokens (the paper's first figure, left), with fitted exponents.

python -m benchmarks.length            1k to 40k tokens, 14x14 to 192x192 grids; writes to a new folder in output/
python -m benchmarks.length --quick    up to 1k tokens, seconds; writes nothing unless --output says where

Width 64, float32, ours with the feature maps and a bias, standard attention without one. Three panels: the forward pass
over a sequence with 16, 32 and 64 features, forward+backward, and grids, both with 32.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.layer import Layer
from benchmarks.measure import NO_FIT, memory_and_time, memory_limit
from benchmarks.report import Report, by_size, options, save_figure

SDPA, STORED = 'sdpa', 'softmax, matrix stored'
BACKENDS = ('fft', 'direct', 'auto')


@dataclass
class Panel:
    """One kind of input over several sizes."""

    name: str
    sizes: tuple[int, ...]  # tokens, or sides of square grids
    features: tuple[int, ...] = (32,)
    grid: bool = False
    backward: bool = False
    trials: int = 10
    few: tuple[int, int] = (1 << 20, 10)  # beyond so many tokens, so many trials

    def layer(self, size: int, m: int) -> Layer:
        return Layer((size, size) if self.grid else None, 0 if self.grid else size, m=m, backward=self.backward)

    def tokens(self, size: int) -> int:
        return size**2 if self.grid else size

    def rounds(self, size: int) -> int:
        return self.few[1] if self.tokens(size) > self.few[0] else self.trials

    def contenders(self, size: int) -> dict:
        """Functions of no arguments by (name, features)."""
        layers = {m: self.layer(size, m) for m in self.features}
        first = layers[self.features[0]]
        ours = {(backend, m): layer.ours(backend) for m, layer in layers.items() for backend in BACKENDS}
        return {(SDPA, ''): first.sdpa(), (STORED, ''): first.softmax_stored(), **ours}

    @property
    def count(self) -> int:
        return 2 + len(BACKENDS) * len(self.features)

    @property
    def calls(self) -> int:
        return sum(self.count * (self.rounds(size) + 1) for size in self.sizes)


LENGTHS = (1024, 2048, 4096, 8192, 16384, 24576, 40960)
FULL = [
    Panel('sequence, forward', LENGTHS, (16, 32, 64)),
    Panel('sequence, forward+backward', LENGTHS, backward=True, few=(8192, 3)),
    Panel('grid, forward', (14, 28, 56, 80, 112, 144, 192), grid=True),
]
QUICK = [
    Panel('sequence, forward', (256, 1024), (4, 8), trials=2),
    Panel('sequence, forward+backward', (256, 512), (4,), backward=True, trials=2),
    Panel('grid, forward', (8, 16), (4,), grid=True, trials=2),
]
FIT_FROM = 8000  # tokens: below, fixed costs bend the curves


def measure(panel: Panel, size: int, bar) -> list[dict]:
    """A row per contender: median and fastest seconds, and peak memory."""
    bar.set_description(f'{panel.name}, {panel.tokens(size)} tokens')
    peaks, seconds = memory_and_time(panel.contenders(size), panel.rounds(size), bar)
    rows = []
    for (contender, m), peak in peaks.items():
        times = seconds.get((contender, m), [])
        rows.append(
            {
                'panel': panel.name,
                'n': panel.tokens(size),
                'contender': contender,
                'm': m,
                'rounds': len(times),
                'seconds': f'{statistics.median(times):.5f}' if times else peak,
                'fastest': f'{min(times):.5f}' if times else peak,
                'peak_mb': f'{peak:.1f}' if times else peak,
            }
        )
    return rows


def series(rows: list[dict], key: str) -> dict[tuple, tuple[np.ndarray, np.ndarray]]:
    """Tokens and values of each (panel, contender, m), those that fit."""
    points = {}
    for r in rows:
        if r[key] != NO_FIT:
            points.setdefault((r['panel'], r['contender'], r['m']), []).append((r['n'], float(r[key])))
    return {name: tuple(np.array(p).T) for name, p in points.items()}


def exponents(rows: list[dict], start: int) -> list[dict]:
    """p of seconds ~ tokens^p and of MB ~ tokens^p, least squares in logarithms from `start` tokens on."""
    fits = []
    memory = series(rows, 'peak_mb')
    for name, (n, seconds) in series(rows, 'seconds').items():
        fit = dict(zip(('panel', 'contender', 'm'), name), from_n=start)
        for key, values in (('time', seconds), ('memory', memory[name][1])):
            used = (n >= start) & (values > 0)
            fit[key] = f'{np.polyfit(np.log(n[used]), np.log(values[used]), 1)[0]:.2f}' if used.sum() > 1 else ''
        fits.append(fit)
    return fits


def label_of(contender: str, m: int | str) -> str:
    return contender if m == '' else f'{contender}, m={m}'


def plot(rows: list[dict], path: Path) -> None:
    """Time above, memory below, a column per panel; a cross on the upper edge marks what does not fit."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(r['panel'] for r in rows))
    figure = Figure(figsize=(13, 7.5), layout='constrained')
    axes = figure.subplots(2, len(panels), sharex='col', squeeze=False)
    colors = dict(zip((SDPA, STORED, *BACKENDS), ('black', 'gray', 'tab:blue', 'tab:red', 'tab:green')))
    for line, (key, label) in enumerate((('seconds', 'seconds, median'), ('peak_mb', 'peak memory, MB'))):
        for (panel, contender, m), (n, values) in series(rows, key).items():
            axis = axes[line][panels.index(panel)]
            style = {4: ':', 8: '-', 16: ':', 32: '-', 64: '--'}.get(m, '-')
            # auto lies on one of the others: wide and faint, so that both show
            look = {'lw': 3, 'alpha': 0.5} if contender == 'auto' else {'lw': 1.5}
            values = np.maximum(values, 0.1) if key == 'peak_mb' else values  # a page or none, for the logarithm
            axis.plot(n, values, style, color=colors[contender], label=label_of(contender, m), **look)
        for r in rows:
            if r[key] == NO_FIT:
                axis = axes[line][panels.index(r['panel'])]
                axis.plot(r['n'], 0.97, 'x', color=colors[r['contender']], transform=axis.get_xaxis_transform())
        axes[line][0].set_ylabel(label)
    for column, panel in enumerate(panels):
        axes[0][column].set_title(panel)
        axes[1][column].set_xlabel('tokens (× does not fit)')
        for axis in axes[:, column]:
            axis.set(xscale='log', yscale='log')
            axis.grid(alpha=0.3)
        axes[0][column].legend(fontsize=7)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument('--limit', type=float, default=12.0, help='memory in GB beyond which a contender does not fit')
    args = parser.parse_args(argv)
    report = Report.of(args, 'length')
    panels = QUICK if args.quick else FULL
    rows = []
    with tqdm(total=sum(panel.calls for panel in panels)) as bar, memory_limit(args.limit):
        for panel in panels:
            for size in panel.sizes:
                rows += measure(panel, size, bar)
    fits = exponents(rows, 0 if args.quick else FIT_FROM)
    for panel in panels:
        mine = [r for r in rows if r['panel'] == panel.name]
        report.table(by_size(mine, lambda r: label_of(r['contender'], r['m']), 'n'), panel.name)
    report.table(fits, 'exponents')
    report.save({'length': rows, 'length_exponents': fits}, {'length': lambda path: plot(rows, path)})


if __name__ == '__main__':
    main()
