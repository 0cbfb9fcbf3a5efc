"""Number of random features and kind of feature map, each trained from scratch: normalized, with a shared bias.

python -m benchmarks.ablations --data-dir DIR    Fashion-MNIST at 12 px; writes docs/results/ablations.csv and .png
python -m benchmarks.ablations --quick           tiny models on the embedded digits
"""

import sys
from pathlib import Path

from benchmarks.pictures import dots
from benchmarks.runs import Lab, Run, Table, main, said
from benchmarks.variants import runs

SEEDS = 2
FEATURES = (8, 16, 32, 64)
MAPS = ('prf', 'orf', 'sphere', 'trf', 'elu')
DEFAULT = ('prf', 32)  # the file's own, which other experiments train too


def name(kernel: str, m: int) -> str:
    return 'nprf_bias' if (kernel, m) == DEFAULT else f'nprf_bias_{kernel}_{m}'


def ablation(kernel: str, m: int) -> list[Run]:
    if (kernel, m) == DEFAULT:
        return runs('nprf_bias', SEEDS)
    changes = (f'model_kwargs.kernel={kernel}', f'model_kwargs.feature_dim={m}')
    return runs('nprf_bias', SEEDS, *changes, suffix=f'_{kernel}_{m}')


CASES = [*(('prf', m) for m in FEATURES), *((kernel, 32) for kernel in MAPS if kernel != 'prf')]


def experiment(lab: Lab) -> None:
    with lab.table('ablations', report, plot) as table:
        chosen = [run for case in CASES for run in ablation(*case)]
        chosen.sort(key=lambda run: run.seed)  # one run of each before the second of any
        lab.fill(table, chosen, ('top1', 'loss'))


def report(table: Table) -> list[dict]:
    """Mean ± deviation between runs of every case there is so far."""
    rows = []
    for kernel, m in CASES:
        tops = table.values('top1', variant=name(kernel, m))
        if tops:
            features = '16 (head dim)' if kernel == 'elu' else m
            rows.append({'feature map': kernel, 'features': features, 'top-1': said(tops), 'runs': len(tops)})
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
            dots(axes, x, table.values('top1', variant=name(*case)))
        axes.set_xticks(range(len(ticks)), ticks)
        axes.grid(alpha=0.3)
    panels[0].set(xlabel='features m (prf)', ylabel='top-1, %')
    panels[1].set(xlabel='feature map (m = 32)')
    figure.savefig(path, dpi=150)


if __name__ == '__main__':
    sys.exit(main(__doc__, experiment))
