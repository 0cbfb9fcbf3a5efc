"""Accuracy at higher resolution: trained at 28 or 32 px, evaluated at 1.5 to 4 times that, as trained and fine-tuned.

The three ways to continue a bias on a larger grid, beside softmax with an interpolated bias and with interpolated
absolute positions. The same pictures with more pixels: CIFAR-10's 32 and Fashion-MNIST's 28 pixels, enlarged.

python -m experiments.high_resolution --data-dir DIR    writes to a new folder in output/
python -m experiments.high_resolution --quick           tiny models on the embedded digits, or on DIR

DIR has what configs/cifar10_small.yaml and configs/fashion_mnist.yaml ask for.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import save_figure
from experiments.command import main
from experiments.runs import CIFAR, Run, Runner, Table, validate_run, with_spread
from experiments.variants import runs

IMAGES = 2500  # of the 10,000 of the test set, evenly spread
# The rate: of 5e-4, 2e-3 and 6e-3 the best for interpolate at 64 px, on training images.
TUNE = ('epochs=1', 'warmup_epochs=0', 'lr=2e-3', 'batch_size=32')
TENTH, WHOLE = 0.1, 1.0  # of an epoch
FINE_TUNES = {0.0: 'no', TENTH: 'a tenth of an epoch', WHOLE: 'one epoch'}
SCALES = (1, 1.5, 2, 3, 4)


@dataclass(frozen=True)
class Images:
    """A dataset: what it sets in configs/cifar10_small.yaml, the trained and the larger sizes, steps of an epoch."""

    name: str
    changes: tuple[str, ...]
    sizes: tuple[int, ...]
    steps: int
    patch: int = 4

    def grid(self, pixels: int) -> int:
        return pixels // self.patch


_GREY = ('in_chans=1', 'mean=[0.286]', 'std=[0.353]', 'dataset=torch/fashion_mnist', 'train_images=60000')
_PATCHES = ('img_size=28', 'model_kwargs.patch_size=7')
CIFAR10 = Images('CIFAR-10', (), (32, 48, 64, 96, 128), 390)
FASHION_MNIST = Images('Fashion-MNIST', (*_GREY, *_PATCHES), (28, 42, 56, 84, 112), 468, patch=7)
DATASETS = (CIFAR10, FASHION_MNIST)
SMALL = Images('digits', (), (8, 12, 16), 30)  # for --quick


class Way(NamedTuple):
    """A trained variant, how its positions are continued, size of cells or window by the trained grid, and seeds."""

    variant: str
    extend: str = 'interpolate'
    size: float = 1
    seeds: int = 1


# bias: learned at 30 times the common learning rate
WAYS = {
    'NPRF, interpolate': Way('nprf_bias_fast', seeds=3),
    'NPRF, cells': Way('nprf_bias_fast', 'cells', seeds=3),
    'NPRF, cells, twice as many': Way('nprf_bias_fast', 'cells', 2),
    'NPRF, extend': Way('nprf_bias_fast', 'extend'),
    'NPRF, extend, window cropped': Way('nprf_bias_fast', 'extend', 0.75),
    'softmax, bias interpolated': Way('softmax_bias_fast'),
    'softmax, absolute positions interpolated': Way('softmax'),
}

MAIN = [label for label, way in WAYS.items() if way.seeds > 1]


class Case(NamedTuple):
    images: Images
    label: str
    seed: int
    pixels: int
    tuned: float  # epochs

    @property
    def key(self) -> dict:
        images, label, seed, pixels, tuned = self
        return {'dataset': images.name, 'model': label, 'pixels': pixels, 'seed': seed, 'tuned': tuned}


def cases(images: Images, variant: str) -> list[Case]:
    """Evaluations, then fine-tunes of a tenth of an epoch: at the largest size of one seed and the main ways alone."""
    trained, *larger = images.sizes
    every = [(label, seed) for label, way in WAYS.items() if way.variant == variant for seed in range(way.seeds)]
    found = [Case(images, label, seed, p, 0.0) for p in (trained, *larger) for label, seed in every]
    found += [Case(images, label, seed, p, TENTH) for p in larger[:-1] for label, seed in every]
    return found + [Case(images, label, 0, larger[-1], TENTH) for label in MAIN if WAYS[label].variant == variant]


def whole_epochs(images: Images) -> list[Case]:
    """Fine-tunes of an epoch, at twice the size."""
    return [Case(images, label, 0, images.sizes[2], WHOLE) for label in MAIN]


def trained_run(case: Case) -> Run:
    suffix = '_fashion' if case.images is FASHION_MNIST else '_cifar10'
    return runs(WAYS[case.label].variant, case.seed + 1, *case.images.changes, suffix=suffix, config=CIFAR)[-1]


def larger_run(runner: Runner, case: Case) -> Run:
    """The trained run at another resolution, started from its weights."""
    run, way, images = trained_run(case), WAYS[case.label], case.images
    changes = [*run.changes, f'img_size={case.pixels}', f'val_limit={40 if runner.quick else IMAGES}']
    changes += [f'initial_checkpoint={runner.folder(run) / "best.pt"}']
    changes += ['torchcompile=null', 'model_kwargs.exportable=false']  # too few steps to be worth compiling
    how = way.extend
    if way.extend != 'interpolate':
        size = min(round(way.size * images.grid(images.sizes[0])), images.grid(case.pixels))
        changes += [f'model_kwargs.rel_pos_extend={way.extend}', f'model_kwargs.rel_pos_size={size}']
        how += f'{size}'
    if case.tuned:
        changes += [*TUNE, f'epoch_steps={round(case.tuned * images.steps)}']
        how += f'_tuned{case.tuned:g}'
    return Run(f'{run.variant}_{how}_{case.pixels}px', run.seed, tuple(changes), run.config)


def parts(datasets: Sequence[Images]) -> list[tuple[Images, str]]:
    """What is trained and measured together: the variant of several seeds first, then one dataset after the other."""
    main, *others = dict.fromkeys(way.variant for way in WAYS.values())
    return [(images, main) for images in datasets] + [(images, v) for images in datasets for v in others]


def experiment(runner: Runner) -> None:
    with runner.table('high_resolution', ('dataset', 'model', 'pixels', 'seed', 'tuned'), report, plot) as table:
        datasets = [SMALL] if runner.quick else DATASETS
        for images, variant in parts(datasets):
            measure(runner, table, cases(images, variant))
        for images in datasets:
            measure(runner, table, whole_epochs(images))


def measure(runner: Runner, table: Table, wanted: list[Case]) -> None:
    """Of what the table lacks, the trainings at the trained size, then all evaluations, then all fine-tunes.

    Cases that are the same run, as cells at the trained size, share it.
    """
    left = [case for case in wanted if not table.has(**case.key)]
    for _ in runner.train(dict.fromkeys(trained_run(case) for case in left)):
        pass
    evaluated: dict[Run, list[Case]] = {}
    tuned: dict[Run, list[Case]] = {}
    for case in left:
        (tuned if case.tuned else evaluated).setdefault(larger_run(runner, case), []).append(case)
    by_folder = {runner.folder(run): run for run in evaluated}
    items = [(runner.config(run), folder) for folder, run in by_folder.items()]
    for (_, folder), row in runner.each(validate_run, items, 'evaluations'):
        add(runner, table, evaluated[by_folder[folder]], by_folder[folder], 'validate.py', row)
    for run, row in runner.train(tuned):
        add(runner, table, tuned[run], run, 'train.py', row)


def add(runner: Runner, table: Table, cases: list[Case], run: Run, script: str, row: dict) -> None:
    command = run.command(script).replace(str(runner.work), 'RUNS')
    table.add(*({**case.key, 'top1': f'{float(row["top1"]):.6g}', 'command': command} for case in cases))


def report(table: Table) -> list[dict]:
    """Top-1 as trained and after fine-tuning, as far as there is; sizes in units of the trained one.

    Of several seeds in brackets the first one's, which the ways of one seed are to be compared with.
    """
    rows = []
    for images in [i for i in (*DATASETS, SMALL) if table.has(dataset=i.name)]:
        for tuned, said in FINE_TUNES.items():
            for label in WAYS:
                found = [tops(table, images, label, pixels, tuned) for pixels in images.sizes]
                if any(found):
                    cells = {f'{scale:g}×': _all_and_first(v) for scale, v in zip(SCALES, found)}
                    rows.append({'images': images.name, 'fine-tuned': said, 'model': label, **cells})
    return rows


def _all_and_first(values: list[float]) -> str:
    if not values:
        return ''
    return with_spread(values, 1) + (f' ({values[0]:.1f})' if len(values) > 1 else '')


def plot(table: Table, path: Path) -> None:
    """A row per dataset, of the first seed: left as trained, right after a tenth of an epoch."""
    from matplotlib.figure import Figure

    shown = [i for i in (*DATASETS, SMALL) if table.has(dataset=i.name)]
    figure = Figure(figsize=(11, 4 * len(shown)), layout='constrained')
    for images, panels in zip(shown, figure.subplots(len(shown), 2, sharey='row', squeeze=False)):
        for tuned, axes in zip((0.0, TENTH), panels):
            for i, label in enumerate(WAYS):
                points = {p: tops(table, images, label, p, tuned if p > images.sizes[0] else 0.0) for p in images.sizes}
                seen = {p: t[0] for p, t in points.items() if t}
                if seen:
                    axes.plot(list(seen), list(seen.values()), 'os<>v^D'[i] + '-', color=f'C{i}', label=label)
            when = 'after a tenth of an epoch' if tuned else 'as trained'
            axes.set(xlabel='side, px', title=f'{images.name}, {when}')
            axes.set_xticks(images.sizes)
            axes.grid(alpha=0.3)
        panels[0].set(ylabel='top-1, %')
        panels[0].legend(fontsize=8, loc='lower left')
    save_figure(figure, path, 150)


def tops(table: Table, images: Images, label: str, pixels: int, tuned: float) -> list[float]:
    return table.values('top1', dataset=images.name, model=label, pixels=pixels, tuned=tuned)


if __name__ == '__main__':
    sys.exit(main('high_resolution', __doc__, experiment))
