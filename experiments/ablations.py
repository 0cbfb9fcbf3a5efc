"""Number of random features and kind of feature map, each trained from scratch: normalized, with a shared bias.

Twice: the bias learns at the rate of the rest, and 30 times as fast.

python -m experiments.ablations --data-dir DIR    Fashion-MNIST at 12 px; writes to a new folder in output/
python -m experiments.ablations --quick           tiny models on the embedded digits, or on DIR
"""

import sys
from pathlib import Path

from benchmarks.report import save_figure
from experiments.command import main
from experiments.pictures import dots
from experiments.runs import Run, Runner, Table, with_spread
from experiments.variants import runs

SEEDS = 2
FEATURES = (8, 16, 32, 64)
MAPS = ('prf', 'orf', 'sphere', 'trf', 'elu')
DEFAULT = ('prf', 32)  # the file's own, which other experiments train too
BASES = {'nprf_bias': 'bias at the common rate', 'nprf_bias_fast': 'bias ×30'}


def suffix(kernel: str, m: int) -> str:
    return '' if (kernel, m) == DEFAULT else f'_{kernel}_{m}'


def ablation(base: str, kernel: str, m: int) -> list[Run]:
    changes = (f'model_kwargs.kernel={kernel}', f'model_kwargs.feature_dim={m}') if suffix(kernel, m) else ()
    return runs(base, SEEDS, *changes, suffix=suffix(kernel, m))


CASES = [*(('prf', m) for m in FEATURES), *((kernel, 32) for kernel in MAPS if kernel != 'prf')]


def experiment(runner: Runner) -> None:
    with runner.table('ablations', ('variant', 'seed'), report, plot) as table:
        chosen = [run for base in BASES for case in CASES for run in ablation(base, *case)]
        chosen.sort(key=lambda run: run.seed)  # one run of each before the second of any
        runner.fill(table, chosen, ('top1', 'loss'))


def tops(table: Table, base: str, kernel: str, m: int) -> list[float]:
    return table.values('top1', variant=base + suffix(kernel, m))


def report(table: Table) -> list[dict]:
    """Mean ± deviation between runs of every case there is so far."""
    rows = []
    for kernel, m in CASES:
        found = {label: tops(table, base, kernel, m) for base, label in BASES.items()}
        if any(found.values()):
            row = {'feature map': kernel, 'features': '16 (head dim)' if kernel == 'elu' else m}
            row |= {label: with_spread(values) if values else '' for label, values in found.items()}
            rows.append({**row, 'runs of each': max(map(len, found.values()))})
    return rows


def plot(table: Table, path: Path) -> None:
    """Left accuracy against the number of features, right against their kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout='constrained')
    panels = figure.subplots(1, 2, sharey=True)
    for axes, cases, ticks in (
        (panels[0], [('prf', m) for m in FEATURES], [str(m) for m in FEATURES]),
        (panels[1], [(kernel, 32) for kernel in MAPS], list(MAPS)),
    ):
        for x, case in enumerate(cases):
            for i, (base, label) in enumerate(BASES.items()):
                dots(axes, x + 0.2 * i, tops(table, base, *case), f'C{i}', '' if x else label)
        axes.set_xticks(range(len(ticks)), ticks)
        axes.grid(alpha=0.3)
    panels[0].set(xlabel='features m (prf)', ylabel='top-1, %')
    panels[1].set(xlabel='feature map (m = 32)')
    panels[0].legend(loc='lower left')
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('ablations', __doc__, experiment))
