"""The number of random features, each trained from scratch on CIFAR-10 for 20 epochs: normalized, with a bias ×30.

python -m experiments.feature_dim --data-dir DIR    CIFAR-10; writes to a new folder in output/
python -m experiments.feature_dim --quick           tiny models on the embedded digits, or on DIR
"""

import sys
from pathlib import Path

from benchmarks.report import save_figure
from experiments.command import main
from experiments.image_table import FILE_RATE, main_runs, shared_runs
from experiments.pictures import dots
from experiments.runs import CIFAR, Run, Runner, Table, with_spread
from experiments.variants import runs

FEATURES = (4, 8, 16, 32, 64)
OWN = 16  # of configs/cifar10_small.yaml
SEEDS = {4: 2, 8: 2, OWN: 3, 32: 2, 64: 2}
BASE = 'nprf_bias_fast'


def feature_runs(m: int) -> list[Run]:
    """The file's own number has the runs of the image table."""
    if m == OWN:
        return main_runs(BASE, FILE_RATE)[: SEEDS[m]]
    return runs(BASE, SEEDS[m], f'model_kwargs.feature_dim={m}', suffix=f'_m{m}_cifar10', config=CIFAR)


def experiment(runner: Runner) -> None:
    with runner.table('feature_dim', ('features', 'seed'), report, plot) as table:
        wanted = [(run, m) for m in FEATURES for run in feature_runs(m)]
        wanted.sort(key=lambda pair: pair[0].seed)  # one run of each before the second of any
        left = {run: m for run, m in wanted if not table.has(features=m, seed=run.seed)}
        for run, last in shared_runs(runner, left):
            row = {'features': left[run], 'seed': run.seed}
            row |= {name: f'{float(last[name]):.6g}' for name in ('train_loss', 'top1', 'loss')}
            table.add({**row, 'command': run.command()})


def report(table: Table) -> list[dict]:
    rows = []
    for m in FEATURES:
        tops = table.values('top1', features=m)
        if tops:
            loss = with_spread(table.values('train_loss', features=m), 3)
            rows.append({'features': m, 'top-1': with_spread(tops), 'training loss': loss, 'runs': len(tops)})
    return rows


def plot(table: Table, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.8), layout='constrained')
    axes = figure.subplots()
    for x, m in enumerate(FEATURES):
        dots(axes, x, table.values('top1', features=m))
    axes.set_xticks(range(len(FEATURES)), [str(m) for m in FEATURES])
    axes.set(xlabel='random features m', ylabel='top-1 on the test set, %', title='CIFAR-10, 20 epochs')
    axes.grid(alpha=0.3)
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('feature_dim', __doc__, experiment))
