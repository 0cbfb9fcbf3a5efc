"""The order of the paper's image table at small scale, and what moves it: positions, bias, learning rate, length.

python -m experiments.ordering --data-dir DIR    Fashion-MNIST at 12 px; writes to a new folder in output/
python -m experiments.ordering --quick           tiny models on the embedded digits, or on DIR
"""

import sys
from pathlib import Path

from benchmarks.report import save_figure
from experiments.command import main
from experiments.pictures import dots
from experiments.runs import Runner, Table, with_spread
from experiments.variants import LABELS, long_runs, runs

SEEDS, FACTOR_SEEDS = 3, 2
# the table's four, and those with a bias that learns faster: three seeds, and three times as long
MAIN = LABELS | {'nprf_bias_fast': 'NPRF with bias ×30', 'softmax_bias_fast': 'softmax with bias ×30'}

# one factor at a time: positions, bias per layer, its learning rate
FACTORS = {
    'nprf_no_positions': 'NPRF, no positions at all',
    'nprf': 'NPRF, absolute',
    'nprf_bias': 'NPRF, shared bias',
    'nprf_bias_abs': 'NPRF, shared bias + absolute',
    'nprf_layer': 'NPRF, bias per layer',
    'nprf_layer_abs': 'NPRF, bias per layer + absolute',
    'nprf_bias_fast': 'NPRF, shared bias, its rate ×30',
    'nprf_bias_fast_abs': 'NPRF, shared bias ×30 + absolute',
    'prf_bias_fast': 'PRF, shared bias ×30',
    'softmax_bias': 'softmax, shared bias',
}


def experiment(runner: Runner) -> None:
    chosen = [run for name in MAIN for run in runs(name, SEEDS)]
    factors = [run for name in FACTORS if name not in MAIN for run in runs(name, FACTOR_SEEDS)]
    chosen += sorted(factors, key=lambda run: run.seed)  # one run of each before the second of any
    longer = [run for name in MAIN for run in long_runs(name, SEEDS)]
    chosen += sorted(longer, key=lambda run: run.seed)
    with runner.table('ordering', ('variant', 'seed'), report, plot) as table:
        runner.fill(table, chosen, ('top1', 'loss'))


def report(table: Table) -> list[dict]:
    """Mean ± deviation between runs of every model there is so far."""
    rows = []
    for name, label in (MAIN | {name: label for name, label in FACTORS.items() if name not in MAIN}).items():
        tops, longer = table.values('top1', variant=name), table.values('top1', variant=f'{name}_long')
        if tops:
            row = {'model': label, 'top-1': with_spread(tops), 'runs': len(tops)}
            rows.append({**row, 'three times as long': with_spread(longer) if longer else ''})
    return rows


def plot(table: Table, path: Path) -> None:
    """Left the table's four models and a faster bias, short and long; right one factor at a time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 4.6), layout='constrained')
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1.25))
    for x, name in enumerate(MAIN):
        dots(left, x, table.values('top1', variant=name), label='' if x else '600 steps')
        dots(left, x + 0.25, table.values('top1', variant=f'{name}_long'), 'C1', '' if x else '1800 steps')
    left.set_xticks(range(len(MAIN)), [label.replace(' ', '\n') for label in MAIN.values()])
    left.legend(loc=(0.03, 0.6))
    left.set(ylabel='top-1, %', title="the image table's models")
    for y, name in enumerate(FACTORS):
        dots(right, len(FACTORS) - y, table.values('top1', variant=name), across=True)
    right.set_yticks([len(FACTORS) - y for y in range(len(FACTORS))], list(FACTORS.values()))
    right.set(xlabel='top-1, %', title='one factor at a time')
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('ordering', __doc__, experiment))
