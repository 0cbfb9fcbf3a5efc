"""Where training breaks: loss curves of PRF and of NPRF with bias at increasing constant learning rates.

python -m benchmarks.stability --data-dir DIR    Fashion-MNIST at 12 px; writes docs/results/stability.csv and .png
python -m benchmarks.stability --quick           tiny models on the embedded digits
"""

import math
import statistics
import sys
from pathlib import Path

from benchmarks.runs import Lab, Run, Table, main
from benchmarks.variants import LABELS, VARIANTS
from nprf_vit.engine.output import read_rows

RATES = ('1e-3', '3e-3', '1e-2', '3e-2', '1e-1')
MODELS = ('prf', 'nprf_bias', 'softmax')
# nothing that would hide an instability: no clipping, no warm-up, no decay
HARSH = ('clip_grad=null', 'warmup_epochs=0', 'epochs=4', 'epoch_steps=75', 'log_interval=5', 'val_limit=500')
CHANCE = math.log(10)  # loss of a model that knows nothing about ten classes


def stability_run(variant: str, rate: str) -> Run:
    return Run(f'{variant}_lr{rate}', 0, (*VARIANTS[variant], *HARSH, f'lr={rate}', f'min_lr={rate}'))


def experiment(lab: Lab) -> None:
    with lab.table('stability', report, plot) as table:
        cases = {stability_run(m, r): (m, r) for m in MODELS for r in RATES if not table.has(model=m, lr=r)}
        for run, _ in lab.train(cases):
            model, rate = cases[run]
            points = read_rows(lab.folder(run) / 'steps.csv')
            table.add(*({'model': model, 'lr': rate, 'step': p['step'], 'loss': p['loss']} for p in points))


def ending(table: Table, model: str, rate: str) -> float:
    """Mean loss over the last fifth of a run, nan if it left the numbers."""
    losses = table.values('loss', model=model, lr=rate)
    return statistics.fmean(losses[-max(1, len(losses) // 5) :]) if losses else math.nan


def report(table: Table) -> list[dict]:
    """Loss at the end of each run; bold where it is not clearly below chance."""
    rows = []
    for rate in RATES:
        ends = {model: ending(table, model, rate) for model in MODELS}
        cells = {LABELS[m]: f'{e:.2f}' if e < 0.9 * CHANCE else f'**{e:.2f}**' for m, e in ends.items()}
        rows.append({'learning rate': rate, **cells})
    return rows


def plot(table: Table, path: Path) -> None:
    """A panel per model, a curve per learning rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout='constrained')
    for axes, model in zip(figure.subplots(1, len(MODELS), sharey=True), MODELS):
        for i, rate in enumerate(RATES):
            steps, losses = (table.values(column, model=model, lr=rate) for column in ('step', 'loss'))
            axes.plot(steps, [min(loss, 10) for loss in losses], color=f'C{i}', label=f'lr {rate}')
        axes.axhline(CHANCE, color='grey', ls='--', lw=1)
        axes.set(title=LABELS[model], xlabel='step', yscale='log')
        axes.grid(alpha=0.3)
    axes.figure.axes[0].set(ylabel='training loss (cut at 10; dashed: chance)')
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == '__main__':
    sys.exit(main(__doc__, experiment))
