"""Attention with a bias between 14x14 cells: beside SDPA without any bias, and beside our own attention without one.

python -m benchmarks.cells            56x56 to 256x256, forward and with gradients; writes to a new folder in output/
python -m benchmarks.cells --quick    small grids; writes nothing unless --output says where
"""

import statistics
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.layer import Layer
from benchmarks.measure import interleave, peak_memory, ratio
from benchmarks.report import Report, options, save_figure


class Side(NamedTuple):
    """A square grid, and what we hold ourselves to there."""

    side: int
    cells: int = 14
    sdpa_rounds: int = 1  # 0: SDPA would take many minutes
    backward: bool = False
    least: float | None = None  # times as fast as SDPA
    most: float | None = None  # times as long as without a bias

    @property
    def mode(self) -> str:
        return 'forward+backward' if self.backward else 'forward'


FULL = [
    Side(56, sdpa_rounds=5, least=6.0),
    Side(64, sdpa_rounds=5, least=6.0),
    Side(112, sdpa_rounds=3, least=25.0, most=2.2),
    Side(128, sdpa_rounds=3, least=32.0, most=2.2),
    Side(192, sdpa_rounds=1, least=60.0, most=2.2),
    Side(256, sdpa_rounds=0, most=2.2),
    Side(56, sdpa_rounds=3, backward=True, least=4.8),
    Side(64, sdpa_rounds=3, backward=True, least=4.8),
    Side(112, sdpa_rounds=1, backward=True, least=20.0),
    Side(128, sdpa_rounds=1, backward=True, least=25.6),
    Side(192, sdpa_rounds=1, backward=True, least=48.0),
]
QUICK = [Side(12, cells=4), Side(13, cells=4, sdpa_rounds=0), Side(12, cells=4, backward=True)]
ROUNDS = 9  # beside our own attention without a bias


def measure(side: Side, rounds: int, bar: tqdm) -> dict:
    """One row; ratios are medians of ratios within rounds."""
    layer = Layer((side.side, side.side), heads=12, backward=side.backward)
    ours = layer.ours_cells((side.cells, side.cells), backend='cells')
    seconds = interleave({'cells': ours, 'no bias': layer.ours_without_bias()}, rounds, bar)
    own = statistics.median(seconds['cells'])
    row = {'side': side.side, 'cells': side.cells, 'mode': side.mode, 'seconds': round(own, 5)}
    row['us_per_token'] = round(1e6 * own / side.side**2, 2)
    row['over_no_bias'] = round(ratio(seconds, 'cells', 'no bias'), 3)
    row |= {'sdpa_seconds': '', 'speedup': '', 'least': side.least or '', 'most': side.most or ''}
    if side.sdpa_rounds:
        # one before and one after: the neighbours may change while SDPA runs
        contenders = {'cells': ours, 'sdpa': layer.sdpa(), 'again': ours}
        times = interleave(contenders, side.sdpa_rounds, bar, warm_up=False)
        row['sdpa_seconds'] = round(statistics.median(times['sdpa']), 5)
        both = zip(times['cells'], times['again'], times['sdpa'])
        row['speedup'] = round(statistics.median(2 * c / (a + b) for a, b, c in both), 2)
    row['peak_mb'] = round(peak_memory(ours), 1)
    return row


def show(rows: list[dict]) -> None:
    """The table, and whether each target is met."""
    for r in rows:
        line = f'{r["side"]:>4}x{r["side"]:<4} {r["mode"]:<17} {r["us_per_token"]:7.1f} us per token'
        line += f'  {r["peak_mb"]:8.1f} MB  {r["over_no_bias"]:5.2f}x as long as without a bias'
        if r['most'] != '':
            line += f' (at most {r["most"]}: {"met" if r["over_no_bias"] <= r["most"] else "MISSED"})'
        if r['speedup'] != '':
            line += f'  {r["speedup"]:6.2f}x as fast as SDPA'
        if r['least'] != '' and r['speedup'] != '':
            line += f' (target {r["least"]}: {"met" if r["speedup"] >= r["least"] else "MISSED"})'
        print(line)


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for axis, mode in zip(axes, ('forward', 'forward+backward')):
        mine = [r for r in rows if r['mode'] == mode]
        axis.plot([r['side'] ** 2 for r in mine], [r['seconds'] for r in mine], 'o-', label='bias between cells')
        beside = [(r['side'] ** 2, r['sdpa_seconds']) for r in mine if r['sdpa_seconds'] != '']
        axis.plot(*zip(*beside), 's-', label='SDPA without bias')
        axis.set(xscale='log', yscale='log', xlabel='tokens', ylabel='seconds', title=mode)
        axis.set_xticks([r['side'] ** 2 for r in mine], [f'{r["side"]}²' for r in mine])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(loc='upper left')
    figure.suptitle('12 heads, D=64, M=32, float32, two CPU cores; feature maps included')
    figure.tight_layout()
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    args = options(__doc__).parse_args(argv)
    report = Report.of(args, 'cells')
    sides, rounds = (QUICK, 2) if args.quick else (FULL, ROUNDS)
    with tqdm(total=sum(2 * (rounds + 1) + 3 * side.sdpa_rounds for side in sides)) as bar:
        rows = [measure(side, rounds, bar) for side in sides]
    report.banner()
    show(rows)
    report.save({'cells': rows}, {'cells': lambda path: plot(rows, path)})


if __name__ == '__main__':
    main()
