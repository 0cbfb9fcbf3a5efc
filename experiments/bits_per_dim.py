"""The order of the paper's ImageNet32 table at small scale: bits per dimension of images, same budget for all.

python -m experiments.bits_per_dim                                      scikit-learn's 8×8 digits, 64 bytes
python -m experiments.bits_per_dim --images cifar10 --data-dir DIR      CIFAR-10 at 16×16 pixels, 768 bytes
python -m experiments.bits_per_dim --quick                              tiny models, a few steps
"""

import sys
from pathlib import Path

from benchmarks.report import save_figure
from experiments.cifar10_arrays import arrays_file, make_arrays
from experiments.command import main, table_name
from experiments.histogram import histogram_bits
from experiments.pictures import dots
from experiments.runs import CIFAR_PIXEL, PIXEL, Run, Runner, Table, with_spread
from experiments.variants import FAST_BIAS

SEEDS = 3
BUDGET = ('epochs=16',)  # of 44 steps of 32 images; the demonstration in docs/pixel.md has 40
IMAGES = ('digits', 'cifar10')
SIDE = 16  # of CIFAR-10, of 32 pixels

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


# of 9e-3 and 2.7e-2 (with the faster bias of 3e-3 and 9e-3) the rate with the lower training loss of one run of 600
# steps, in which no image comes twice
CIFAR_RATES = {
    'nprf_bias': '2.7e-2',
    'prf': '9e-3',
    'softmax': '2.7e-2',
    'nprf_bias_fast': '9e-3',
    'softmax_bias_fast': '9e-3',
}


def pixel_runs(variant: str, images: str | None = None) -> list[Run]:
    """Of a file each; that of CIFAR-10 has the budget in it."""
    if images == 'cifar10':
        name, config, file = f'pixel_{variant}_cifar10', CIFAR_PIXEL, arrays_file(SIDE)
        changes: tuple[str, ...] = (*VARIANTS[variant], f'lr={CIFAR_RATES[variant]}')
    else:
        name, changes, config, file = f'pixel_{variant}', (*VARIANTS[variant], *BUDGET), PIXEL, ''
    return [Run(name, s, (*changes, f'model_kwargs.seed={s}'), config, file) for s in range(SEEDS)]


def experiment(runner: Runner) -> None:
    with runner.table(table_name('bits_per_dim', runner.images, IMAGES), ('variant', 'seed'), report, plot) as table:
        names = CIFAR_RATES if runner.images == 'cifar10' else VARIANTS
        if runner.images == 'cifar10' and runner.data_dir:
            make_arrays(Path(runner.data_dir), SIDE)
        chosen = [run for name in names for run in pixel_runs(name, runner.images)]
        chosen.sort(key=lambda run: run.seed)  # one run of each before the second of any
        runner.fill(table, chosen, ('ema_bpd', 'ema_bpd_se', 'bpd'))


def seen(table: Table) -> dict[str, list[float]]:
    """Bits per dimension of every model there is so far, by the name of the variant."""
    suffix = '_cifar10' if table.path.stem.endswith('_cifar10') else ''
    found = {name: table.values('ema_bpd', variant=f'pixel_{name}{suffix}') for name in LABELS}
    return {name: bits for name, bits in found.items() if bits}


def report(table: Table) -> list[dict]:
    """Mean ± deviation between runs of every model there is so far."""
    found = seen(table).items()
    labels = {name: LABELS[name].replace('\n', ' ') for name, _ in found}
    return [{'model': labels[name], 'bits/dim': with_spread(bits, 3), 'runs': len(bits)} for name, bits in found]


def plot(table: Table, path: Path) -> None:
    """Bits per dimension of every run; beside digits of a histogram per pixel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout='constrained')
    axes = figure.subplots()
    found = seen(table)
    for x, bits in enumerate(found.values()):
        dots(axes, x, bits)
    if not table.path.stem.endswith('_cifar10'):
        axes.axhline(histogram_bits()[0], color='grey', ls='--', label='histogram per pixel')
        axes.legend()
    axes.set_xticks(range(len(found)), [LABELS[name] for name in found])
    axes.set(ylabel='bits/dim (lower is better)')
    axes.grid(alpha=0.3)
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('bits_per_dim', __doc__, experiment, images=IMAGES))
