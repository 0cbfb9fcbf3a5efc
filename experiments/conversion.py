"""Conversion without fine-tuning: models trained with softmax for 1800 steps, then switched to random features.

{standard, normalized} × {absolute positions, relative bias instead, the same learning 30 times as fast}, 4 to 1024
features, five draws of each.

python -m experiments.conversion --data-dir DIR    Fashion-MNIST at 12 px; writes to a new folder in output/
python -m experiments.conversion --quick           tiny models on the embedded digits, or on DIR
"""

import statistics
import sys
from pathlib import Path

import torch

from benchmarks.report import save_figure
from experiments.command import main
from experiments.runs import Run, Runner, Table, passed, quiet
from experiments.variants import long_runs
from nprf_vit import convert
from nprf_vit.config.schema import Config
from nprf_vit.config.yaml_file import override
from nprf_vit.data.batch import Batch
from nprf_vit.engine.build import build_evaluation
from nprf_vit.engine.eval_loop import evaluate
from nprf_vit.engine.model import build_model, load_exact, read_weights
from nprf_vit.models import KernelVisionTransformer

FEATURES = tuple(2**i for i in range(2, 11))
DRAWS = 5
T_QUANTILE = 2.776  # Student's t at 97.5 % with four degrees of freedom: intervals of 95 % from five draws
IMAGES = 1000
MODELS = {
    'softmax': 'standard',
    'softmax_bias': 'standard, bias',
    'softmax_bias_fast': 'standard, bias ×30',
    'nsoftmax': 'normalized',
    'nsoftmax_bias': 'normalized, bias',
    'nsoftmax_bias_fast': 'normalized, bias ×30',
}


def experiment(runner: Runner) -> None:
    features = (0, *(FEATURES[:2] if runner.quick else FEATURES))
    with runner.table('conversion', ('model', 'features'), report, plot) as table:
        oracles = {long_runs(name, 1)[0]: name for name in MODELS}
        pending = {run: [m for m in features if not table.has(model=name, features=m)] for run, name in oracles.items()}
        trained = [run for run, _ in runner.train(run for run, left in pending.items() if left)]
        names = {runner.folder(run): name for run, name in oracles.items()}
        measure_all(runner, table, [(run, m) for run in trained for m in pending[run]], names)


def measure_all(runner: Runner, table: Table, cases: list[tuple[Run, int]], names: dict[Path, str]) -> None:
    """Rows of the oracle (0 features) and of the converted models, whose names are by the folders of their runs."""
    limit = {} if runner.quick else {'val_limit': IMAGES}
    items = [(override(runner.config(run), **limit), runner.folder(run), m) for run, m in cases]
    for (_, folder, m), (tops, radius) in runner.each(measure, items, 'conversions'):
        about = {'model': names[folder], 'features': m, 'radius': f'{radius:.3f}'}
        table.add(*({**about, 'draw': draw, 'top1': f'{top:.6g}'} for draw, top in enumerate(tops)))


def measure(config: Config, folder: Path, m: int, deadline: float | None) -> tuple[list[float], float] | None:
    """Top-1 of the trained model (m = 0) or of each draw of m features, and the radius of its queries and keys."""
    if passed(deadline):
        return None
    with quiet(folder) as place:
        model = build_model(config).eval()
        load_exact(model, read_weights(str(folder / 'best.pt')), str(folder))
        part = build_evaluation(config, place, model)
        batches = [Batch(batch.images, batch.targets) for batch in part.batches]  # in memory, for all draws
        models = [convert(model, 'prf', m, seed) for seed in range(DRAWS)] if m else [model]
        metrics = [evaluate({'': each}, batches, part.task, place, None, part.autocast) for each in models]
        return [row['top1'] for row in metrics], radius(model, batches[0].images)


@torch.no_grad()
def radius(model: KernelVisionTransformer, images: torch.Tensor) -> float:
    """Length of queries and keys as the kernel sees them, mean over blocks: the R of the approximation figure."""
    found = []

    def look(attn, args):
        q, k, _ = attn.project(args[0])
        found.append((q.norm(dim=-1).mean() * k.norm(dim=-1).mean()).sqrt() * attn.head_dim**-0.25)

    if model.blocks[0].attn.normalize:
        return 1.0
    hooks = [block.attn.register_forward_pre_hook(look) for block in model.blocks]
    model(images)
    for hook in hooks:
        hook.remove()
    return float(torch.stack(found).mean())


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
    """Accuracy against features with confidence intervals; dashed what softmax had."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4), layout='constrained')
    axes = figure.subplots()
    for i, (name, label) in enumerate(MODELS.items()):
        seen = sorted({int(row['features']) for row in table.rows if row['model'] == name} - {0})
        points = [interval(table.values('top1', model=name, features=m)) for m in seen]
        means, halves = zip(*points)
        axes.errorbar(seen, means, halves, fmt='o-', ms=4, capsize=3, color=f'C{i}', label=label)
        axes.axhline(table.values('top1', model=name, features=0)[0], color=f'C{i}', ls='--', lw=1)
    axes.set(xscale='log', xlabel='random features m', ylabel='top-1, % (dashed: before conversion)')
    axes.set_xticks(seen, [str(m) for m in seen])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc='lower right')
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('conversion', __doc__, experiment))
