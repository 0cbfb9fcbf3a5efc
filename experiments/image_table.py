"""The order of the paper's image table on CIFAR-10: 20 epochs, three seeds, each model at its own learning rate.

First every model is trained for 4 epochs on 45,000 images at each of three learning rates and measured on the other
5000 of the training set; with the best rate it is then trained on all 50,000. The test set is used once per run.

python -m experiments.image_table --data-dir DIR    CIFAR-10; writes to a new folder in output/
python -m experiments.image_table --quick           tiny models on the embedded digits, or on DIR
"""

import sys
from pathlib import Path

from benchmarks.report import save_figure
from experiments.command import main
from experiments.pictures import dots
from experiments.runs import CIFAR, Run, Runner, Table, with_spread
from experiments.variants import LABELS, runs

SEEDS, RATES = 3, ('3e-3', '9e-3', '2.7e-2')
FILE_RATE = '9e-3'  # of configs/cifar10_small.yaml
MODELS = LABELS | {
    'nprf_bias_fast': 'NPRF with bias ×30',
    'softmax_bias': 'softmax with bias',
    'softmax_bias_fast': 'softmax with bias ×30',
}
HELD_OUT = ('train_split=train[:45000]', 'val_split=train[45000:]', 'train_images=45000', 'val_images=5000')


def sweep_run(runner: Runner, variant: str, rate: str) -> Run:
    part = () if runner.quick else HELD_OUT
    return runs(variant, 1, *part, 'epochs=4', f'lr={rate}', suffix=f'_cifar10_sweep_{rate}', config=CIFAR)[0]


def main_runs(variant: str, rate: str) -> list[Run]:
    """At the file's rate the runs that experiments.high_resolution has too."""
    changes, suffix = ((), '_cifar10') if rate == FILE_RATE else ((f'lr={rate}',), f'_cifar10_{rate}')
    return runs(variant, SEEDS, *changes, suffix=suffix, config=CIFAR)


def experiment(runner: Runner) -> None:
    with runner.table('image_table', ('model', 'stage', 'lr', 'seed'), report, plot) as table:
        sweep = {sweep_run(runner, v, r): (v, r) for v in MODELS for r in RATES}
        fill(runner, table, 'sweep', sweep)
        chosen = {run: (v, rate) for v in MODELS for rate in [best_rate(table, v)] for run in main_runs(v, rate)}
        fill(runner, table, 'test', dict(sorted(chosen.items(), key=lambda item: item[0].seed)))


def fill(runner: Runner, table: Table, stage: str, wanted: dict[Run, tuple[str, str]]) -> None:
    """Train what the table does not have, and add a row for each."""
    left = {r: key for r, key in wanted.items() if not table.has(model=key[0], stage=stage, lr=key[1], seed=r.seed)}
    for run, last in runner.train(left):
        model, rate = left[run]
        row = {'model': model, 'stage': stage, 'lr': rate, 'seed': run.seed, 'epochs': last['epoch']}
        row |= {name: f'{float(last[name]):.6g}' for name in ('train_loss', 'top1', 'loss')}
        table.add({**row, 'command': run.command()})


def best_rate(table: Table, variant: str) -> str:
    return max(RATES, key=lambda rate: table.values('top1', model=variant, stage='sweep', lr=rate)[0])


def report(table: Table) -> list[dict]:
    """Held-out accuracy of the sweep, then the test set's at the best rate."""
    rows = []
    for variant, label in MODELS.items():
        found = {rate: table.values('top1', model=variant, stage='sweep', lr=rate) for rate in RATES}
        tops = table.values('top1', model=variant, stage='test')
        if any(found.values()) or tops:
            row = {'model': label, **{f'4 epochs, lr {r}': f'{v[0]:.1f}' if v else '' for r, v in found.items()}}
            rows.append({**row, 'test, 20 epochs': with_spread(tops) if tops else '', 'runs': len(tops)})
    return rows


def plot(table: Table, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout='constrained')
    axes = figure.subplots()
    for x, variant in enumerate(MODELS):
        dots(axes, x, table.values('top1', model=variant, stage='test'))
    axes.set_xticks(range(len(MODELS)), [label.replace(' with', '\nwith') for label in MODELS.values()])
    axes.set(ylabel='top-1 on the test set, %', title='CIFAR-10, 20 epochs, each at its own learning rate')
    axes.grid(alpha=0.3)
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('image_table', __doc__, experiment))
