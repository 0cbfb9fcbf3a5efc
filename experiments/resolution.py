"""Accuracy at higher resolution: trained at 12 px, evaluated at 18, 24 and 36, before and after a short fine-tune.

A bias interpolated, or continued by a constant beyond its radius, beside interpolated absolute positions: of NPRF and
of softmax, in this family's ViT (no class token) and in timm's DeiT. Images: the 28 pixels of Fashion-MNIST reduced
to 12, 18 and 24, and enlarged to 36.

python -m experiments.resolution --data-dir DIR    writes to a new folder in output/
python -m experiments.resolution --quick           tiny models on the embedded digits, or on DIR
"""

import sys
from pathlib import Path

from benchmarks.report import save_figure
from experiments.command import main
from experiments.runs import Run, Runner, Table, validate_run, with_spread
from experiments.variants import DEIT, runs

SEEDS = 1
SCALES = (1.5, 2.0, 3.0)
IMAGES = 2500
TUNE = ('epochs=1', 'epoch_steps=60', 'warmup_epochs=0', 'global_batch=32', 'batch_size=32', 'lr=5e-4')
EXTENDED = ('model_kwargs.rel_pos_extend=extend', 'model_kwargs.rel_pos_size=6')  # of the trained grid, 6x6
# label → the trained variant, and what its larger twin sets besides; ×30: the bias learned so many times as fast
CASES = {
    'NPRF, bias interpolated': ('nprf_bias', ()),
    'NPRF, bias extended': ('nprf_bias', EXTENDED),
    'NPRF, bias ×30 interpolated': ('nprf_bias_fast', ()),
    'NPRF, bias ×30 extended': ('nprf_bias_fast', EXTENDED),
    'NPRF, absolute interpolated': ('nprf', ()),
    'softmax ViT, absolute interpolated': ('softmax', ()),
    'softmax DeiT (timm), absolute interpolated': ('deit', ()),
}


def trained_runs(variant: str) -> list[Run]:
    if variant == 'deit':
        return [Run('deit', seed, DEIT) for seed in range(SEEDS)]
    return runs(variant, SEEDS)


def larger(runner: Runner, run: Run, label: str, scale: float, tuned: bool) -> Run:
    """The twin of a trained run at a higher resolution, started from its weights."""
    pixels = round(scale * runner.config(run).img_size)
    changes = [*run.changes, *CASES[label][1], f'img_size={pixels}', f'val_limit={40 if runner.quick else IMAGES}']
    changes += [f'initial_checkpoint={runner.folder(run) / "best.pt"}', *(TUNE if tuned else ())]
    how = 'extended' if CASES[label][1] else 'interpolated'
    return Run(f'{run.variant}_{how}_{pixels}px', run.seed, tuple(changes), run.config)


def experiment(runner: Runner) -> None:
    scales = SCALES[:1] if runner.quick else SCALES
    stages = [(1.0, 0), *((s, tuned) for s in scales for tuned in (0, 1))]  # no fine-tune at the trained resolution
    cases = [(l, s, r, tuned) for l in CASES for s, tuned in stages for r in trained_runs(CASES[l][0])]
    with runner.table('resolution', ('model', 'scale', 'seed', 'tuned'), report, plot) as table:
        cases = [(l, s, r, t) for l, s, r, t in cases if not table.has(model=l, scale=s, seed=r.seed, tuned=t)]
        for _ in runner.train(dict.fromkeys(r for _, _, r, _ in cases)):
            pass
        measure(runner, table, cases)


def measure(runner: Runner, table: Table, cases: list[tuple]) -> None:
    """First all evaluations as trained, then all fine-tunes."""
    for tuned in (0, 1):
        twins = {larger(runner, r, l, s, bool(tuned)): (l, s) for l, s, r, t in cases if t == tuned}
        if tuned:
            results = runner.train(twins)
        else:
            by_folder = {runner.folder(twin): twin for twin in twins}
            items = [(runner.config(twin), folder) for folder, twin in by_folder.items()]
            results = ((by_folder[item[1]], row) for item, row in runner.each(validate_run, items, 'evaluations'))
        for twin, row in results:
            label, scale = twins[twin]
            script = 'train.py' if tuned else 'validate.py'
            about = {'model': label, 'scale': scale, 'pixels': runner.config(twin).img_size, 'seed': twin.seed}
            table.add({**about, 'tuned': tuned, 'top1': f'{float(row["top1"]):.6g}', 'command': twin.command(script)})


def report(table: Table) -> list[dict]:
    """Top-1 as trained and after fine-tuning, as far as there is."""
    rows = []
    for label in CASES:
        row = {'model': label}
        for scale, tuned in [(s, t) for t in (0, 1) for s in (1.0, *SCALES) if s > 1 or not t]:
            tops = table.values('top1', model=label, scale=scale, tuned=tuned)
            row[f'{scale:g}×' + ', tuned' * tuned] = with_spread(tops, 1) if tops else ''
        rows.append(row)
    return rows


def plot(table: Table, path: Path) -> None:
    """Left as trained, right after fine-tuning, against the scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout='constrained')
    panels = figure.subplots(1, 2, sharey=True)
    for tuned, axes in enumerate(panels):
        for i, label in enumerate(CASES):
            seen = [s for s in (1.0, *SCALES) if table.has(model=label, scale=s, tuned=tuned if s > 1 else 0)]
            tops = [table.values('top1', model=label, scale=s, tuned=tuned if s > 1 else 0) for s in seen]
            axes.plot(seen, [sum(t) / len(t) for t in tops], 'os<>^Dv'[i] + '-', color=f'C{i}', label=label)
        axes.set(
            xlabel='resolution, in units of the trained one', title=('as trained', 'after a short fine-tune')[tuned]
        )
        axes.set_xticks((1.0, *SCALES))
        axes.grid(alpha=0.3)
    panels[0].set(ylabel='top-1, %')
    panels[1].legend(fontsize=8, loc='lower left')  # where no curve goes
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('resolution', __doc__, experiment))
