"""The order of the paper's image table on CIFAR-10: 20 epochs, three seeds, each model at its own learning rate.

First every model is trained for 4 epochs on 45,000 images at each of three learning rates and measured on the other
5000 of the training set. With the best rate it is then trained on all 50,000: the file's rate, unless another one is
ahead by more than a standard error of the difference. The test set is used once per run.

python -m experiments.image_table --data-dir DIR    CIFAR-10; writes to a new folder in output/
python -m experiments.image_table --quick           tiny models on the embedded digits, or on DIR
"""

import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.report import save_figure
from experiments.command import main
from experiments.pictures import dots
from experiments.runs import CIFAR, Run, Runner, Table, with_spread
from experiments.variants import LABELS, runs
from nprf_vit.engine.output.csv_file import read_rows

SEEDS, RATES = 3, ('3e-3', '9e-3', '2.7e-2')
FILE_RATE = '9e-3'  # of configs/cifar10_small.yaml
MODELS = LABELS | {
    'nprf_bias_fast': 'NPRF with bias ×30',
    'softmax_bias': 'softmax with bias',
    'softmax_bias_fast': 'softmax with bias ×30',
}
HELD_OUT_IMAGES = 5000
HELD_OUT = ('train_split=train[:45000]', 'val_split=train[45000:]', 'train_images=45000', 'val_images=5000')


def sweep_run(runner: Runner, variant: str, rate: str, seed: int = 0) -> Run:
    part = () if runner.quick else HELD_OUT
    return runs(variant, seed + 1, *part, 'epochs=4', f'lr={rate}', suffix=f'_cifar10_sweep_{rate}', config=CIFAR)[-1]


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


def shared_runs(runner: Runner, wanted: Iterable[Run]) -> Iterator[tuple[Run, dict[str, str]]]:
    """As `Runner.train`, for other experiments: what the image table in the same folder has is not trained again."""
    wanted, path = list(wanted), runner.report.path('image_table.csv')
    rows = {row['command']: row for row in (read_rows(path) if path.is_file() else []) if row['train_loss']}
    found = {run: rows[run.command()] for run in wanted if run.command() in rows}
    if found:
        print(f'{len(found)} runs taken over from {path}: {", ".join(run.name for run in found)}')
    yield from found.items()
    yield from runner.train(run for run in wanted if run not in found)


def best_rate(table: Table, variant: str) -> str:
    """The rate to train with: a lead over the file's that is within the noise of the held-out images does not count."""
    tops = {rate: table.values('top1', model=variant, stage='sweep', lr=rate)[0] for rate in RATES}
    best = max(RATES, key=tops.__getitem__)
    share = tops[FILE_RATE] / 100
    noise = 100 * math.sqrt(2 * share * (1 - share) / HELD_OUT_IMAGES)  # of the difference of two accuracies
    return best if tops[best] > tops[FILE_RATE] + noise else FILE_RATE


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
    """Left every model's held-out accuracy against its learning rate, right the test accuracy of every run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout='constrained')
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for i, (variant, label) in enumerate(MODELS.items()):
        points = [(rate, table.values('top1', model=variant, stage='sweep', lr=rate)) for rate in RATES]
        found = {rate: tops[0] for rate, tops in points if tops}
        left.plot(list(found), list(found.values()), 'o-', ms=4, color=f'C{i}', label=label)
        dots(right, i, table.values('top1', model=variant, stage='test'), f'C{i}')
    left.set(xlabel='learning rate', ylabel='top-1 on 5000 held-out images, %', title='4 epochs')
    left.legend(fontsize=8)
    right.set_xticks(range(len(MODELS)), [label.replace(' with', '\nwith') for label in MODELS.values()], fontsize=8)
    right.set(ylabel='top-1 on the test set, %', title='20 epochs, each at its own learning rate')
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('image_table', __doc__, experiment))
