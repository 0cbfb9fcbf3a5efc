"""Whole models beside their timm peers: time and memory against resolution, training throughput at 224 px.

python -m benchmarks.models            224 to 2048 px, about half an hour on two cores; writes docs/results/models.*
python -m benchmarks.models --quick    two-block models on small images; writes nothing unless --output says where
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from tqdm import tqdm

import nprf_vit  # noqa: F401  registers the models
from benchmarks.measure import RESULTS, interleave, ratio, write_csv

OURS, DEIT, RELPOS = 'nprf_deit_base', 'deit_base_patch16_224', 'vit_relpos_base_patch16_224'
SMALL = {'embed_dim': 192, 'num_heads': 3, 'depth': 2}
NO_FIT = 'does not fit'


@dataclass
class Case:
    """One resolution; `targets` are the least throughputs of ours relative to a peer that the project promises."""

    pixels: int
    batch: int
    rounds: int
    targets: dict[str, float]
    training: bool = False
    models: tuple[str, ...] = (OURS, DEIT, RELPOS)

    @property
    def mode(self) -> str:
        return 'training' if self.training else 'inference'


FULL = [
    Case(224, 8, 15, {DEIT: 0.97}),
    Case(224, 8, 9, {DEIT: 0.93}, training=True, models=(OURS, DEIT)),
    Case(384, 1, 9, {}),
    Case(512, 1, 9, {RELPOS: 1.0}),
    Case(768, 1, 5, {}),
    Case(1024, 1, 3, {RELPOS: 2.0}),
    Case(1536, 1, 1, {}),
    Case(2048, 1, 1, {}),
]
QUICK = [Case(64, 2, 3, {}), Case(64, 2, 3, {}, training=True, models=(OURS, DEIT)), Case(128, 1, 3, {})]


def build(name: str, case: Case, small: bool):
    """A function of no arguments that runs one step of the model."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=case.pixels, **(SMALL if small else {})).train(case.training)
    image = torch.randn(case.batch, 3, case.pixels, case.pixels)

    def step():
        if case.training:
            model.zero_grad()
            model(image).square().mean().backward()
        else:
            with torch.inference_mode():
                model(image)

    return step


def limit_memory(gigabytes: float) -> None:
    """Make allocations beyond the limit fail here, before the system picks a victim elsewhere."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)


def status(key: str) -> float:
    """Megabytes that the kernel reports for this process."""
    for line in Path('/proc/self/status').read_text().splitlines():
        if line.startswith(key + ':'):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f'/proc/self/status has no {key}')


def measure_memory(name: str, case: Case, small: bool) -> float:
    """Megabytes at the peak of one step, weights included, libraries not; for a process that does nothing else."""
    before = status('VmRSS')
    step = build(name, case, small)
    Path('/proc/self/clear_refs').write_text('5')  # forget the peak of building
    step()
    return status('VmHWM') - before


def memory_in_child(name: str, index: int, args) -> float | None:
    """`measure_memory` in a process of its own; None where it exceeds the limit."""
    command = [sys.executable, '-m', 'benchmarks.models', '--child', name, str(index), '--limit', str(args.limit)]
    run = subprocess.run([*command, *(['--quick'] if args.quick else [])], capture_output=True, text=True)
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1])
    if 'allocate memory' in run.stderr or 'MemoryError' in run.stderr:
        return None
    raise RuntimeError(f'measuring {name} failed:\n{run.stderr}')


def run_case(index: int, case: Case, args, progress) -> list[dict]:
    """Memory of each model in a child, then time of those that fit, interleaved; one row per model."""
    memory = {}
    for name in case.models:
        progress.set_description(f'{case.pixels} px {case.mode}, memory of {name}')
        memory[name] = memory_in_child(name, index, args)
        progress.update()
    progress.set_description(f'{case.pixels} px {case.mode}, time')
    steps = {name: build(name, case, args.quick) for name in case.models if memory[name] is not None}
    seconds = interleave(steps, case.rounds, progress)
    progress.update((case.rounds + 1) * (len(case.models) - len(steps)))
    rows = []
    for name in case.models:
        row = {'pixels': case.pixels, 'batch': case.batch, 'mode': case.mode, 'model': name}
        if name in seconds:
            row['seconds'] = round(statistics.median(seconds[name]), 4)
            row['images_per_second'] = round(case.batch / statistics.median(seconds[name]), 3)
            row['ours_over_this'] = round(ratio(seconds, name, OURS), 3)
            row['peak_mb'] = round(memory[name])
        else:
            row.update(seconds=NO_FIT, images_per_second='', ours_over_this='', peak_mb=NO_FIT)
        row['target'] = case.targets.get(name, '')
        rows.append(row)
    return rows


def plot(rows: list[dict], path: Path) -> None:
    """Time and memory against resolution; a cross on the upper edge marks a peer that does not fit."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    rows = [r for r in rows if r['mode'] == 'inference']
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for ax, key, label in zip(axes, ('seconds', 'peak_mb'), ('seconds per image', 'peak memory, MB')):
        for name in dict.fromkeys(r['model'] for r in rows):
            mine = [r for r in rows if r['model'] == name]
            fits = [r for r in mine if r[key] != NO_FIT]
            scale = [r['batch'] if key == 'seconds' else 1 for r in fits]
            xs, ys = [r['pixels'] for r in fits], [r[key] / s for r, s in zip(fits, scale)]
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
    fig.savefig(path, dpi=150)


def report(rows: list[dict]) -> None:
    """The table, and for each promise whether it is kept."""
    for r in rows:
        speed = f'{r["images_per_second"]:>9} img/s' if r['seconds'] != NO_FIT else f'{NO_FIT:>15}'
        line = f'{r["pixels"]:>5} px {r["mode"]:>9}  {r["model"]:<28}{speed}  {r["peak_mb"]:>12} MB'
        if r['ours_over_this'] != '' and r['model'] != OURS:
            line += f'   ours {r["ours_over_this"]:.2f}x as fast'
            if r['target'] != '':
                line += f' (target {r["target"]}: {"kept" if r["ours_over_this"] >= r["target"] else "MISSED"})'
        print(line)
    peak = {(r['model'], r['pixels']): r['peak_mb'] for r in rows if r['mode'] == 'inference'}
    ours, theirs = peak.get((OURS, 1024)), peak.get((RELPOS, 1024))
    if ours and theirs:
        share = 0.0 if theirs == NO_FIT else ours / theirs
        print(f'peak memory at 1024 px: {share:.2f}x of {RELPOS} (target 0.5: {"kept" if share <= 0.5 else "MISSED"})')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='small models and images')
    parser.add_argument('--max-pixels', type=int, default=2048, help='leave out larger images')
    parser.add_argument('--limit', type=float, default=16.0, help='memory in GB beyond which a model does not fit')
    parser.add_argument('--output', type=Path, help='directory for models.csv and models.png')
    parser.add_argument('--child', nargs=2, metavar=('MODEL', 'CASE'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = QUICK if args.quick else FULL
    limit_memory(args.limit)
    if args.child:
        print(json.dumps(measure_memory(args.child[0], cases[int(args.child[1])], args.quick)))
        return
    chosen = [(i, c) for i, c in enumerate(cases) if c.pixels <= args.max_pixels]
    rows = []
    with tqdm(total=sum(len(c.models) * (c.rounds + 2) for _, c in chosen)) as progress:
        for index, case in chosen:
            rows += run_case(index, case, args, progress)
    report(rows)
    output = args.output or (None if args.quick else RESULTS)
    if output is not None:
        write_csv(output / 'models.csv', rows)
        plot(rows, output / 'models.png')
        print(f'wrote {output / "models.csv"} and models.png')


if __name__ == '__main__':
    main()
