"""Does the bias need help to learn? Its learning rate, its start, one for all blocks or one each, absolute positions.

Every option is trained for 4 epochs on 45,000 images and measured on the other 5000 of the training set, then for 20
epochs on all 50,000, and the main ones for 60, measured on the test set. All at one learning rate of the weights.

python -m experiments.bias_ablation --data-dir DIR    CIFAR-10; writes to a new folder in output/
python -m experiments.bias_ablation --quick           tiny models on the embedded digits, or on DIR
"""

import dataclasses
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.report import save_figure
from experiments.command import main
from experiments.image_table import FILE_RATE, main_runs, shared_runs, sweep_run
from experiments.pictures import dots
from experiments.runs import Run, Runner, Table, check_data, with_spread
from nprf_vit.engine.model import build_model

SHORT, LONG, LONGEST = 4, 20, 60  # epochs
OPTIONS = {
    'nprf': 'no bias, absolute positions',
    'nprf_bias': 'bias ×1',
    'nprf_bias_x3': 'bias ×3',
    'nprf_bias_x10': 'bias ×10',
    'nprf_bias_fast': 'bias ×30',
    'nprf_bias_x100': 'bias ×100',
    'nprf_start': 'bias ×1, distance start',
    'nprf_start_fast': 'bias ×30, distance start',
    'nprf_layer': 'bias per block ×1',
    'nprf_layer_fast': 'bias per block ×30',
    'nprf_bias_abs': 'bias ×1 + absolute',
    'nprf_bias_fast_abs': 'bias ×30 + absolute',
}
SHORT_SEEDS = 2
LONG_SEEDS = {'nprf': 3, 'nprf_bias': 3, 'nprf_bias_fast': 3, 'nprf_start': 2, 'nprf_start_fast': 2}  # others 1
LONGEST_OPTIONS = ('nprf_bias', 'nprf_bias_fast', 'nprf_start')

STEEPEST = 1.0  # of the distance start: the first head's bias per token of distance; every further head has a quarter


def stage_runs(runner: Runner, option: str, epochs: int) -> list[Run]:
    """Runs of an option; those that the image table has too are the same."""
    if epochs == SHORT:
        found = [sweep_run(runner, option, FILE_RATE, seed) for seed in range(SHORT_SEEDS)]
    elif epochs == LONG:
        found = main_runs(option, FILE_RATE)[: LONG_SEEDS.get(option, 1)]
    else:
        long = main_runs(option, FILE_RATE)[0]
        found = [dataclasses.replace(long, variant=f'{long.variant}_{epochs}', changes=(*long.changes, 'epochs=60'))]
    return [started(runner, run) for run in found] if 'start' in option else found


def started(runner: Runner, run: Run) -> Run:
    """The run from weights whose bias falls with the distance."""
    path = runner.work / f'distance_start-{run.seed}.safetensors'
    return dataclasses.replace(run, changes=(*run.changes, f'initial_checkpoint={path}'))


def write_start(runner: Runner, run: Run) -> None:
    """The weights that a run would start with, but for the table of its bias."""
    *changes, initial = run.changes
    path = Path(initial.removeprefix('initial_checkpoint='))
    if not path.exists():
        model = build_model(runner.config(dataclasses.replace(run, changes=tuple(changes))))
        table = model.rel_pos_bias.table
        with torch.no_grad():
            table.copy_(distance_table(*table.shape))
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)


def distance_table(heads: int, height: int, width: int) -> torch.Tensor:
    """Minus the distance in tokens, times 1, 1/4, 1/16 …: (K, 2H-1, 2W-1)."""
    slopes = STEEPEST * 0.25 ** torch.arange(heads)
    y, x = (torch.arange(n) - n // 2 for n in (height, width))
    return -slopes[:, None, None] * torch.hypot(y[:, None].float(), x.float())


def experiment(runner: Runner) -> None:
    with runner.table('bias_ablation', ('option', 'epochs', 'seed'), report, plot) as table:
        for epochs in (SHORT, LONG, LONGEST):
            options = LONGEST_OPTIONS if epochs == LONGEST else OPTIONS
            every = [(run, option) for option in options for run in stage_runs(runner, option, epochs)]
            every.sort(key=lambda pair: pair[0].seed)  # one run of each before the second of any
            fill(runner, table, epochs, dict(every))


def fill(runner: Runner, table: Table, epochs: int, wanted: dict[Run, str]) -> None:
    left = {r: option for r, option in wanted.items() if not table.has(option=option, epochs=epochs, seed=r.seed)}
    started_runs = [run for run, option in left.items() if 'start' in option]
    if started_runs:
        check_data(runner.config(started_runs[0]))  # before anything is written
    for run in started_runs:
        write_start(runner, run)
    for run, last in shared_runs(runner, left):
        row = {'option': left[run], 'epochs': epochs, 'seed': run.seed}
        row |= {name: f'{float(last[name]):.6g}' for name in ('train_loss', 'top1', 'loss')}
        table.add({**row, 'command': run.command().replace(str(runner.work), 'RUNS')})


def report(table: Table) -> list[dict]:
    """Top-1 of every option there is so far, at each length."""
    said = {SHORT: '4 epochs, held out', LONG: '20 epochs, test', LONGEST: '60 epochs, test'}
    rows = []
    for option, label in OPTIONS.items():
        found = {said[epochs]: table.values('top1', option=option, epochs=epochs) for epochs in said}
        if any(found.values()):
            tops = {
                k: with_spread(v) + (f' ({len(v)} runs)' if len(v) > 1 else '') if v else '' for k, v in found.items()
            }
            rows.append({'positions': label, **tops})
    return rows


def plot(table: Table, path: Path) -> None:
    """A panel per length, a row per option."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout='constrained')
    panels = figure.subplots(1, 2, sharey=True)
    for axes, lengths in zip(panels, ((SHORT,), (LONG, LONGEST))):
        for y, option in enumerate(OPTIONS):
            for i, epochs in enumerate(lengths):
                label = '' if y else f'{epochs} epochs'
                dots(
                    axes, -y - 0.2 * i, table.values('top1', option=option, epochs=epochs), f'C{i}', label, across=True
                )
        axes.grid(alpha=0.3)
        axes.set(xlabel='top-1, %')
    panels[0].set_yticks([-y for y in range(len(OPTIONS))], list(OPTIONS.values()))
    panels[0].set(title='CIFAR-10, 4 epochs, held-out images')
    panels[1].set(title='20 and 60 epochs, test images')
    panels[1].legend()
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('bias_ablation', __doc__, experiment))
