"""Whole models beside their timm peers: time and memory against resolution, training throughput at 224 px.

python -m benchmarks.models            224 to 4096 px, half an hour on two cores; writes to a new folder in output/
python -m benchmarks.models --quick    two-block models on small images; writes nothing unless --output says where
python -m benchmarks.models --max-pixels 512 --continue docs/results    measures these again, keeps the other rows
"""

import argparse
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import timm
import torch
from tqdm import tqdm

import nprf_vit  # noqa: F401  registers the models
from benchmarks.measure import NO_FIT, in_child, interleave, memory_limit, ratio, resident
from benchmarks.report import Report, options, read_csv, refuse, save_figure

OURS, DEIT, RELPOS = 'nprf_deit_base', 'deit_base_patch16_224', 'vit_relpos_base_patch16_224'
EXTENDED = 'nprf_deit_base extended'  # the 14x14 table of 224 px as a window, a constant beyond it
CELLS = 'nprf_deit_base cells'  # the same table as the bias between 14x14 cells of tokens
SWIN = 'swin_base_patch4_window7_224'  # attends within 7x7 windows only: linear in the pixels, and another model
SMALL = {'embed_dim': 192, 'num_heads': 3, 'depth': 2}
SMALL_SWIN = {'embed_dim': 32, 'num_heads': (1, 2, 4, 8), 'depths': (1, 1, 1, 1)}


@dataclass
class Case:
    """One resolution; without warm-up where a single forward takes minutes."""

    pixels: int
    batch: int
    rounds: int
    models: tuple[str, ...] = (OURS, EXTENDED, CELLS, DEIT, RELPOS, SWIN)
    training: bool = False

    @property
    def mode(self) -> str:
        return 'training' if self.training else 'inference'

    @property
    def calls(self) -> int:
        """Calls of the progress bar."""
        return len(self.models) * (1 + self.rounds + (self.rounds > 1))


FULL = [
    Case(224, 8, 15, (OURS, DEIT, RELPOS, SWIN)),
    Case(224, 8, 9, (OURS, DEIT, RELPOS, SWIN), training=True),
    Case(384, 1, 9),
    Case(512, 1, 9),
    Case(768, 1, 5),
    Case(1024, 1, 3),
    Case(1536, 1, 1),
    Case(2048, 1, 1),
    Case(4096, 1, 1, (CELLS,)),
]
QUICK = [
    Case(64, 2, 3, (OURS, DEIT, RELPOS, SWIN)),
    Case(64, 2, 3, (OURS, DEIT, RELPOS, SWIN), training=True),
    Case(128, 1, 3),
]
# what we hold ourselves to: model, peer, pixels, mode, at least so many times the peer's throughput
SPEED = [
    (OURS, DEIT, 224, 'inference', 0.97),
    (OURS, DEIT, 224, 'training', 0.93),
    (OURS, RELPOS, 512, 'inference', 1.0),
    (OURS, RELPOS, 1024, 'inference', 2.0),
    (EXTENDED, DEIT, 2048, 'inference', 3.0),
    (CELLS, DEIT, 1024, 'inference', 1.9),
    (CELLS, DEIT, 2048, 'inference', 4.0),
]
# and model, pixels, at most so many MB for a forward
MEMORY = [(OURS, 1024, 3000), (OURS, 2048, 8000), (EXTENDED, 2048, 4000), (CELLS, 4096, 6000)]
SPREAD = 1.15  # time and memory per token of CELLS may differ by this much from 1024 px on


def build(name: str, case: Case, small: bool):
    """A function of no arguments that runs one step of the model."""
    torch.manual_seed(0)
    shrunk = SMALL_SWIN if name == SWIN else SMALL
    arguments = {'img_size': case.pixels, **(shrunk if small else {})}
    if name in (EXTENDED, CELLS):
        arguments.update(rel_pos_extend='extend' if name == EXTENDED else 'cells', rel_pos_size=4 if small else 14)
    model = timm.create_model(name.split()[0], **arguments).train(case.training)
    image = torch.randn(case.batch, 3, case.pixels, case.pixels)

    def step():
        if case.training:
            model.zero_grad()
            model(image).square().mean().backward()
        else:
            with torch.inference_mode():
                model(image)

    return step


def measure_memory(name: str, case: Case, small: bool) -> float:
    """Megabytes at the peak of one step, weights included, libraries not; for a process that does nothing else."""
    before = resident()
    step = build(name, case, small)
    Path('/proc/self/clear_refs').write_text('5')  # forget the peak of building
    step()
    return resident(peak=True) - before


def run_case(index: int, case: Case, args, progress) -> list[dict]:
    """Memory of each model in a child, then time of those that fit, interleaved; one row per model."""
    memory: dict[str, float | str] = {}
    quick = ['--quick'] if args.quick else []
    for name in case.models:
        progress.set_description(f'{case.pixels} px {case.mode}, memory of {name}')
        memory[name] = math.nan  # known already, unless it is asked for
        if args.add in (None, name):
            child = ('--child', name, str(index), '--limit', str(args.limit), *quick)
            memory[name] = in_child('benchmarks.models', *child)
        progress.update()
    progress.set_description(f'{case.pixels} px {case.mode}, time')
    steps = {name: build(name, case, args.quick) for name in case.models if memory[name] != NO_FIT}
    seconds = interleave(steps, case.rounds, progress, warm_up=case.rounds > 1)
    progress.update((case.rounds + (case.rounds > 1)) * (len(case.models) - len(steps)))
    rows = []
    for name in case.models:
        row = {'pixels': case.pixels, 'batch': case.batch, 'mode': case.mode, 'model': name}
        row.update(seconds=NO_FIT, images_per_second='', speed_over_deit='', speed_over_relpos='', peak_mb=NO_FIT)
        if name in seconds:
            row['seconds'] = round(statistics.median(seconds[name]), 4)
            row['images_per_second'] = round(case.batch / statistics.median(seconds[name]), 3)
            row['peak_mb'] = '' if math.isnan(memory[name]) else round(memory[name])
            for key, peer in (('speed_over_deit', DEIT), ('speed_over_relpos', RELPOS)):
                if peer in seconds:
                    row[key] = round(ratio(seconds, peer, name), 3)
        rows.append(row)
    return rows


def merge(old: list[dict], new: list[dict]) -> list[dict]:
    """Rows of earlier runs, replaced where there are new ones, in the order of resolutions."""
    done = {(r['pixels'], r['mode'], r['model']) for r in new}
    kept = [r for r in old if (r['pixels'], r['mode'], r['model']) not in done]
    return sorted(kept + new, key=lambda r: (r['pixels'], r['mode']))


def plot(rows: list[dict], path: Path) -> None:
    """Time and memory against resolution; a cross on the upper edge marks a peer that does not fit."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    rows = [r for r in rows if r['mode'] == 'inference']
    # rows may come from runs at different speeds of the machine: each by its ratio to DeiT within its own run
    deit = {r['pixels']: r['seconds'] / r['batch'] for r in rows if r['model'] == DEIT}
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for ax, key, label in zip(axes, ('seconds', 'peak_mb'), ('seconds per image, scaled by DeiT', 'peak memory, MB')):
        for name in dict.fromkeys(r['model'] for r in rows):
            mine = [r for r in rows if r['model'] == name]
            fits = [r for r in mine if r[key] != NO_FIT]
            xs, ys = [r['pixels'] for r in fits], [r[key] for r in fits]
            if key == 'seconds':
                ys = [
                    deit[r['pixels']] / r['speed_over_deit'] if r['pixels'] in deit else r['seconds'] / r['batch']
                    for r in fits
                ]
            (line,) = ax.plot(xs, ys, 'o-', label=name)
            for r in mine:
                if r[key] == NO_FIT:
                    ax.plot(
                        r['pixels'], 0.97, 'x', color=line.get_color(), ms=10, mew=2, transform=ax.get_xaxis_transform()
                    )
        ticks = sorted({r['pixels'] for r in rows})
        ax.set(xscale='log', yscale='log', xlabel='image side, pixels (× does not fit)', ylabel=label)
        ax.set_xticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].legend()
    fig.tight_layout()
    save_figure(fig, path, 150)


def show(rows: list[dict]) -> None:
    """The table, and for each target whether it is met."""
    for r in rows:
        speed = f'{r["images_per_second"]:>9} img/s' if r['seconds'] != NO_FIT else f'{NO_FIT:>15}'
        line = f'{r["pixels"]:>5} px {r["mode"]:>9}  {r["model"]:<28}{speed}  {r["peak_mb"]:>12} MB'
        print(line + f'   {r["speed_over_deit"]:>6}x deit  {r["speed_over_relpos"]:>6}x relpos')
    found = {(r['model'], r['pixels'], r['mode']): r for r in rows}
    for model, peer, pixels, mode, least in SPEED:
        row = found.get((model, pixels, mode))
        if row is not None:
            speed = row['speed_over_deit' if peer == DEIT else 'speed_over_relpos']
            said = 'peer does not fit' if speed == '' else 'met' if speed >= least else 'MISSED'
            print(f'{pixels} px {mode}, {model}: {speed}x the throughput of {peer} (target {least}: {said})')
    for model, pixels, most in MEMORY:
        if (model, pixels, 'inference') in found:
            peak = found[model, pixels, 'inference']['peak_mb']
            said = 'met' if peak != NO_FIT and peak <= most else 'MISSED'
            print(f'{pixels} px, {model}: {peak} MB (target {most}: {said})')
    ours, theirs = (found.get((name, 1024, 'inference'), {}).get('peak_mb') for name in (OURS, RELPOS))
    if ours and theirs:
        share = 0.0 if theirs == NO_FIT else ours / theirs
        print(f'peak memory at 1024 px: {share:.2f}x of {RELPOS} (target 0.5: {"met" if share <= 0.5 else "MISSED"})')
    show_cells(found)


def show_cells(found: dict[tuple[str, int, str], dict]) -> None:
    """Whether cells are faster than Swin from 1024 px on, and cost the same per token."""
    mine = {px: r for (name, px, mode), r in found.items() if name == CELLS and mode == 'inference' and px >= 1024}
    for pixels, row in mine.items():
        swin = found.get((SWIN, pixels, 'inference'))
        if swin is not None and '' not in (row['speed_over_deit'], swin['speed_over_deit']):
            speed = row['speed_over_deit'] / swin['speed_over_deit']
            print(f'{pixels} px, {CELLS}: {speed:.2f}x the throughput of {SWIN} (target 1: {_verdict(speed >= 1)})')
    for key in ('seconds', 'peak_mb'):
        each = [row[key] / px**2 for px, row in mine.items() if row[key] not in ('', NO_FIT)]
        if len(each) > 1:
            spread = max(each) / min(each)
            print(
                f'{CELLS}, {key} per token, largest over smallest: {spread:.3f} '
                f'(target {SPREAD}: {_verdict(spread <= SPREAD)})'
            )


def _verdict(met: bool) -> str:
    return 'met' if met else 'MISSED'


def take_over(report: Report) -> list[dict]:
    """Rows of an earlier run to be kept where nothing is measured now."""
    path = report.path('models.csv')
    rows = read_csv(path)
    if not rows:
        refuse(f'nothing to continue: there is no {path}')
    return rows


def print_kept_rows(rows: list[dict], measured: list[dict], path: Path) -> None:
    kept = [r for r in rows if r not in measured]
    names = dict.fromkeys(f'{r["pixels"]} px {r["mode"]} {r["model"]}' for r in kept)
    print(f'not measured now: {len(kept)} rows taken over from {path}: {", ".join(names) or "none"}')


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument('--continue', dest='earlier', type=Path, metavar='FOLDER', help='keep rows not measured now')
    parser.add_argument('--min-pixels', type=int, default=0, help='leave out smaller images')
    parser.add_argument('--max-pixels', type=int, default=4096, help='leave out larger images')
    parser.add_argument('--add', metavar='MODEL', help='only this model, beside DeiT')
    parser.add_argument('--limit', type=float, default=16.0, help='memory in GB beyond which a model does not fit')
    parser.add_argument('--child', nargs=2, metavar=('MODEL', 'CASE'), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    cases = QUICK if args.quick else FULL
    if args.child:
        with memory_limit(args.limit):
            print(json.dumps(measure_memory(args.child[0], cases[int(args.child[1])], args.quick)))
        return
    if args.earlier and args.output:
        refuse('--continue names the folder already: leave out --output')
    report = Report(args.earlier, args.quick) if args.earlier else Report.of(args, 'models')
    earlier = take_over(report) if args.earlier else []
    chosen = [(i, c) for i, c in enumerate(cases) if args.min_pixels <= c.pixels <= args.max_pixels]
    if args.add:
        chosen = [(i, replace(c, models=(args.add, DEIT))) for i, c in chosen if args.add in c.models]
    rows = []
    with tqdm(total=sum(c.calls for _, c in chosen)) as progress, memory_limit(args.limit):
        for index, case in chosen:
            rows += run_case(index, case, args, progress)
    rows = [r for r in rows if args.add in (None, r['model'])]
    measured, rows = rows, merge(earlier, rows)
    report.banner()
    show(rows)
    if earlier:
        print_kept_rows(rows, measured, report.path('models.csv'))
    report.save({'models': rows}, {'models': lambda path: plot(rows, path)})


if __name__ == '__main__':
    main()
