"""Where training breaks: loss curves of PRF, of NPRF and of softmax at increasing constant learning rates.

python -m experiments.stability --data-dir DIR                     Fashion-MNIST at 12 px
python -m experiments.stability --data-dir DIR --images cifar10    configs/cifar10_small.yaml, by AdamW
python -m experiments.stability --quick           tiny models on the embedded digits, or on DIR
"""

import math
import statistics
import sys
from pathlib import Path

from benchmarks.report import save_figure
from experiments.command import main, table_name
from experiments.runs import CIFAR, Run, Runner, Table
from experiments.variants import LABELS, VARIANTS
from nprf_vit.engine.output.csv_file import read_rows

SEEDS = 2
RATES = ('1e-3', '3e-3', '1e-2', '3e-2', '1e-1', '3e-1', '1e0')
MODELS = ('prf', 'nprf', 'nprf_bias', 'softmax')
# nothing that would hide an instability: no clipping, no warm-up, no decay
HARSH = ('clip_grad=null', 'warmup_epochs=0', 'epochs=4', 'epoch_steps=75', 'log_interval=5', 'val_limit=500')
HARSH += ('max_skipped_steps=1000',)  # a run that left the numbers goes on without updates to its end
IMAGES = ('fashion_mnist', 'cifar10')
# AdamW as there, not Muon, whose steps have one length; so few steps are not worth compiling
ON_CIFAR = ('opt=adamw', 'torchcompile=null', 'model_kwargs.exportable=false')
CHANCE = math.log(10)  # loss of a model that knows nothing about ten classes
CUT = 10  # of the pictures; where a loss that is no number goes too


def stability_run(variant: str, rate: str, seed: int, images: str | None = None) -> Run:
    changes = (*VARIANTS[variant], *HARSH, f'lr={rate}', f'min_lr={rate}')
    own = f'model_kwargs.seed={seed}'
    if images == 'cifar10':
        return Run(f'{variant}_lr{rate}_cifar10', seed, (*changes, *ON_CIFAR, own), CIFAR)
    return Run(f'{variant}_lr{rate}', seed, (*changes, own))


def experiment(runner: Runner) -> None:
    with runner.table(table_name('stability', runner.images, IMAGES), ('model', 'lr', 'seed'), report, plot) as table:
        grid = ((m, r, s) for s in range(SEEDS) for m in MODELS for r in RATES)
        left = [(m, r, s) for m, r, s in grid if not table.has(model=m, lr=r, seed=s)]
        cases = {stability_run(m, r, s, runner.images): (m, r) for m, r, s in left}
        for run, _ in runner.train(cases):
            about = {'model': cases[run][0], 'lr': cases[run][1], 'seed': run.seed}
            points = read_rows(runner.folder(run) / 'steps.csv')
            table.add(*({**about, 'step': p['step'], 'loss': p['loss']} for p in points))


def curves(table: Table, model: str, rate: str) -> list[list[float]]:
    """Losses by step of every seed there is so far."""
    seen = (table.values('loss', model=model, lr=rate, seed=seed) for seed in range(SEEDS))
    return [losses for losses in seen if losses]


def ending(losses: list[float]) -> float:
    """Mean loss over the last fifth of a run, nan if it left the numbers."""
    return statistics.fmean(losses[-max(1, len(losses) // 5) :])


def report(table: Table) -> list[dict]:
    """Loss at the end of the runs, best to worst; bold where it is not clearly below chance."""
    rows = []
    for rate in RATES:
        ends = {model: sorted(map(ending, curves(table, model, rate))) for model in MODELS}
        cells = {m: ', '.join(f'{e:.2f}' if e < 0.9 * CHANCE else f'**{e:.2f}**' for e in ends[m]) for m in MODELS}
        rows.append({'learning rate': rate, **{LABELS[m]: cell for m, cell in cells.items()}})
    return rows


def plot(table: Table, path: Path) -> None:
    """A panel per model, a curve per learning rate (the first seed); then the end of every run against the rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.8), layout='constrained')
    *panels, last = figure.subplots(1, len(MODELS) + 1, sharey=True)
    for j, (axes, model) in enumerate(zip(panels, MODELS)):
        for i, rate in enumerate(RATES):
            steps, losses = (table.values(column, model=model, lr=rate, seed=0) for column in ('step', 'loss'))
            axes.plot(steps, [cut(loss) for loss in losses], color=f'C{i}', lw=1, label=f'lr {rate}')
        axes.set(title=LABELS[model], xlabel='step')
        ends = [[cut(ending(losses)) for losses in curves(table, model, rate)] for rate in RATES]
        last.plot(RATES, [statistics.fmean(e) for e in ends], color=f'C{j}', label=LABELS[model])
        last.scatter([r for r, e in zip(RATES, ends) for _ in e], [x for e in ends for x in e], color=f'C{j}', s=12)
    last.set(title='end of every run', xlabel='learning rate')
    for axes in (*panels, last):
        axes.axhline(CHANCE, color='grey', ls='--', lw=1)
        axes.set(yscale='log')
        axes.grid(alpha=0.3)
    panels[0].set(ylabel=f'training loss (cut at {CUT}; dashed: chance)')
    panels[-1].legend(fontsize=8)
    last.legend(fontsize=8)
    save_figure(figure, path, 150)


def cut(loss: float) -> float:
    return min(loss, CUT) if math.isfinite(loss) else CUT


if __name__ == '__main__':
    sys.exit(main('stability', __doc__, experiment, images=IMAGES))
