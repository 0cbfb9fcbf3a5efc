"""Conversion without fine-tuning: models trained with softmax, then switched to random features.

{standard, normalized} × {absolute positions, relative bias instead, the same learning 30 times as fast}, 4 to 1024
features, five draws of each: accuracy, and how far rows of the attention are from what they were.

python -m experiments.conversion --data-dir DIR                     Fashion-MNIST at 12 px, 1800 steps
python -m experiments.conversion --data-dir DIR --images cifar10    configs/cifar10_small.yaml, 20 epochs
python -m experiments.conversion --quick           tiny models on the embedded digits, or on DIR
"""

import statistics
import sys
from pathlib import Path

from benchmarks.report import save_figure
from experiments.attention_rows import radius, row_errors
from experiments.command import main, table_name
from experiments.image_table import FILE_RATE, main_runs
from experiments.runs import Run, Runner, Table, passed, quiet
from experiments.variants import long_runs
from nprf_vit import convert
from nprf_vit.config.schema import Config
from nprf_vit.config.yaml_file import override
from nprf_vit.data.batch import Batch
from nprf_vit.engine.build import build_evaluation
from nprf_vit.engine.eval_loop import evaluate
from nprf_vit.engine.model import build_model, load_exact, read_weights

FEATURES = tuple(2**i for i in range(2, 11))
DRAWS = 5
T_QUANTILE = 2.776  # Student's t at 97.5 % with four degrees of freedom: intervals of 95 % from five draws
EVALUATED, ROWS_OF = 1000, 64  # images, for accuracy and for rows of the attention
IMAGES = ('fashion_mnist', 'cifar10')
MODELS = {
    'softmax': 'standard',
    'softmax_bias': 'standard, bias',
    'softmax_bias_fast': 'standard, bias ×30',
    'nsoftmax': 'normalized',
    'nsoftmax_bias': 'normalized, bias',
    'nsoftmax_bias_fast': 'normalized, bias ×30',
}


def oracle(images: str | None, name: str) -> Run:
    """The model that is switched: on CIFAR-10 the last run that the image table has of it."""
    return main_runs(name, FILE_RATE)[-1] if images == 'cifar10' else long_runs(name, 1)[0]


def experiment(runner: Runner) -> None:
    features = (0, *(FEATURES[:2] if runner.quick else FEATURES))
    title = table_name('conversion', runner.images, IMAGES)
    with runner.table(title, ('model', 'features'), report, plot) as table:
        oracles = {oracle(runner.images, name): name for name in MODELS}
        pending = {run: [m for m in features if not table.has(model=name, features=m)] for run, name in oracles.items()}
        trained = [run for run, _ in runner.train(run for run, left in pending.items() if left)]
        names = {runner.folder(run): name for run, name in oracles.items()}
        measure_all(runner, table, [(run, m) for run in trained for m in pending[run]], names)


def measure_all(runner: Runner, table: Table, cases: list[tuple[Run, int]], names: dict[Path, str]) -> None:
    """Rows of the oracle (0 features) and of the converted models, whose names are by the folders of their runs."""
    limit = {} if runner.quick else {'val_limit': EVALUATED}
    items = [(override(runner.config(run), **limit), runner.folder(run), m) for run, m in cases]
    for (_, folder, m), (tops, errors, length) in runner.each(measure, items, 'conversions'):
        about = {'model': names[folder], 'features': m, 'radius': f'{length:.3f}'}
        rows = (
            {**about, 'draw': i, 'top1': f'{top:.6g}', 'row_error': e} for i, (top, e) in enumerate(zip(tops, errors))
        )
        table.add(*rows)


def measure(
    config: Config, folder: Path, m: int, deadline: float | None
) -> tuple[list[float], list[str], float] | None:
    """Top-1 and row errors of the trained model (m = 0) or of each draw of m features, and the trained one's radius."""
    if passed(deadline):
        return None
    with quiet(folder) as place:
        model = build_model(config).eval()
        load_exact(model, read_weights(str(folder / 'best.pt')), str(folder))
        part = build_evaluation(config, place, model)
        batches = [Batch(batch.images, batch.targets) for batch in part.batches]  # in memory, for all draws
        models = [convert(model, 'prf', m, seed) for seed in range(DRAWS)] if m else [model]
        metrics = [evaluate({'': each}, batches, part.task, place, None, part.autocast) for each in models]
        some = batches[0].images[:ROWS_OF]
        errors = [f'{e:.4f}' for e in row_errors(model, models, some)] if m else ['']
        return [row['top1'] for row in metrics], errors, radius(model, batches[0].images)


def interval(tops: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval over the draws."""
    return statistics.fmean(tops), T_QUANTILE * statistics.stdev(tops) / len(tops) ** 0.5


def report(table: Table) -> list[dict]:
    """What there is so far: radius, the softmax model, and mean ± half a confidence interval per number of features."""
    seen = sorted({int(row['features']) for row in table.rows} - {0})
    rows = []
    for name, label in MODELS.items():
        oracle = table.values('top1', model=name, features=0)
        if oracle:
            row = {'model': label, 'R': f'{table.values("radius", model=name, features=0)[0]:.2f}'}
            row['softmax'] = f'{oracle[0]:.1f}'
            for m in seen:
                tops = table.values('top1', model=name, features=m)
                row[f'm = {m}'] = '{:.1f} ± {:.1f}'.format(*interval(tops)) if tops else ''
            rows.append(row)
    return rows


def plot(table: Table, path: Path) -> None:
    """Accuracy against features with confidence intervals, dashed what softmax had; the error of rows, where known."""
    from matplotlib.figure import Figure

    known = 'row_error' in table.rows[0]
    figure = Figure(figsize=(12 if known else 7.5, 4.4), layout='constrained')
    accuracy, *others = figure.subplots(1, 2 if known else 1, squeeze=False)[0]
    for i, (name, label) in enumerate(MODELS.items()):
        seen = sorted({int(row['features']) for row in table.rows if row['model'] == name} - {0})
        points = [interval(table.values('top1', model=name, features=m)) for m in seen]
        means, halves = zip(*points)
        accuracy.errorbar(seen, means, halves, fmt='o-', ms=4, capsize=3, color=f'C{i}', label=label)
        accuracy.axhline(table.values('top1', model=name, features=0)[0], color=f'C{i}', ls='--', lw=1)
        for axes in others:
            errors = [statistics.fmean(table.values('row_error', model=name, features=m)) for m in seen]
            radius = table.values('radius', model=name, features=0)[0]
            axes.plot(seen, errors, 'o-', ms=4, color=f'C{i}', label=f'{label}, R = {radius:.2f}')
    accuracy.set(ylabel='top-1, % (dashed: before conversion)')
    accuracy.legend(loc='lower right')
    for axes in others:
        axes.set(ylabel='error of a row of the attention, ‖A-Â‖₁', yscale='log')
        axes.legend(loc='lower left')
    for axes in (accuracy, *others):
        axes.set(xscale='log', xlabel='random features m')
        axes.set_xticks(seen, [str(m) for m in seen])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('conversion', __doc__, experiment, images=IMAGES))
