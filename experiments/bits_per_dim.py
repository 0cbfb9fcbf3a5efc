"""The order of the paper's ImageNet32 table at small scale: bits per dimension of 8×8 digits, same budget for all.

python -m experiments.bits_per_dim            scikit-learn's digits; writes to a new folder in output/
python -m experiments.bits_per_dim --quick    tiny models, a few steps
"""

import sys
from pathlib import Path

from benchmarks.report import save_figure
from experiments.command import main
from experiments.histogram import histogram_bits
from experiments.pictures import dots
from experiments.runs import PIXEL, Run, Runner, Table, with_spread
from experiments.variants import FAST_BIAS

SEEDS = 3
BUDGET = ('epochs=16',)  # of 44 steps of 32 images; the demonstration in docs/pixel.md has 40

# positions as in the paper's rows: a bias without absolute positions, or absolute positions without a bias
VARIANTS = {
    'nprf_bias': ('model_kwargs.pos_embed=none',),
    'prf': ('model=prf_pixel_imagenet32',),
    'softmax': ('model=softmax_pixel_imagenet32', 'model_kwargs.rel_pos=none'),
    'softmax_bias': ('model=softmax_pixel_imagenet32', 'model_kwargs.pos_embed=none'),
    'nprf_bias_abs': (),
    # a bias that learns 30 times as fast, as in experiments/variants.py
    'nprf_bias_fast': ('model_kwargs.pos_embed=none', FAST_BIAS),
    'softmax_bias_fast': ('model=softmax_pixel_imagenet32', 'model_kwargs.pos_embed=none', FAST_BIAS),
    'nprf_bias_fast_abs': (FAST_BIAS,),
}
LABELS = {
    'nprf_bias': 'NPRF\nwith bias',
    'prf': 'PRF',
    'softmax': 'softmax',
    'softmax_bias': 'softmax\nwith bias',
    'nprf_bias_abs': 'NPRF\nwith bias\n+ absolute',
    'nprf_bias_fast': 'NPRF with\nbias ×30',
    'softmax_bias_fast': 'softmax with\nbias ×30',
    'nprf_bias_fast_abs': 'NPRF with\nbias ×30\n+ absolute',
}


def pixel_runs(variant: str) -> list[Run]:
    changes = (*VARIANTS[variant], *BUDGET)
    return [Run(f'pixel_{variant}', s, (*changes, f'model_kwargs.seed={s}'), PIXEL) for s in range(SEEDS)]


def experiment(runner: Runner) -> None:
    with runner.table('bits_per_dim', ('variant', 'seed'), report, plot) as table:
        chosen = [run for name in VARIANTS for run in pixel_runs(name)]
        chosen.sort(key=lambda run: run.seed)  # one run of each before the second of any
        runner.fill(table, chosen, ('ema_bpd', 'ema_bpd_se', 'bpd'))


def report(table: Table) -> list[dict]:
    """Mean ± deviation between runs of every model there is so far."""
    rows = []
    for name, label in LABELS.items():
        bits = table.values('ema_bpd', variant=f'pixel_{name}')
        if bits:
            rows.append({'model': label.replace('\n', ' '), 'bits/dim': with_spread(bits, 3), 'runs': len(bits)})
    return rows


def plot(table: Table, path: Path) -> None:
    """Bits per dimension of every run, and of a histogram per pixel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout='constrained')
    axes = figure.subplots()
    for x, name in enumerate(VARIANTS):
        dots(axes, x, table.values('ema_bpd', variant=f'pixel_{name}'))
    axes.axhline(histogram_bits()[0], color='grey', ls='--', label='histogram per pixel')
    axes.set_xticks(range(len(LABELS)), list(LABELS.values()))
    axes.set(ylabel='bits/dim (lower is better)')
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('bits_per_dim', __doc__, experiment, data=False))
