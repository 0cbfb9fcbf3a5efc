"""Attention whose bias is constant beyond 13 tokens: time per token, memory, and SDPA without any bias beside it.

python -m benchmarks.window            64x64 to 256x256, about three minutes; writes to a new folder in output/
python -m benchmarks.window --quick    small grids; writes nothing unless --output says where
"""

import statistics
from pathlib import Path

from tqdm import tqdm

from benchmarks.layer import Layer
from benchmarks.measure import interleave, peak_memory
from benchmarks.report import Report, options, save_figure

# side: rounds of SDPA and the least speed-up over it that we hold ourselves to; at 256x256 it would take minutes
FULL = {64: (5, 2.0), 96: (3, 4.0), 128: (2, 9.0), 192: (1, 20.0), 256: (0, None)}
QUICK = {12: (1, None), 16: (0, None)}
ROUNDS, SPREAD = 9, 1.15  # rounds over all sides for the time per token, which may grow by this much


def measure(sides: dict, rounds: int, bar) -> list[dict]:
    """One row per side. Times per token are interleaved over the sides, so that a neighbour slows all of them alike."""
    layers = {side: Layer((side, side), heads=12) for side in sides}
    windows = {side: layer.ours_window(13) for side, layer in layers.items()}
    seconds = interleave(windows, rounds, bar)
    rows = []
    for side, (beside, promised) in sides.items():
        row = {'side': side, 'tokens': side**2, 'us_per_token': 1e6 * statistics.median(seconds[side]) / side**2}
        row |= {
            'seconds': statistics.median(seconds[side]),
            'sdpa_seconds': '',
            'speedup': '',
            'promised': promised or '',
        }
        if beside:
            # one before and one after: the neighbours may change while SDPA runs
            pair = {'window': windows[side], 'sdpa': layers[side].sdpa(), 'again': windows[side]}
            times = interleave(pair, beside, bar, warm_up=False)
            row['sdpa_seconds'] = statistics.median(times['sdpa'])
            both = zip(times['window'], times['again'], times['sdpa'])
            row['speedup'] = statistics.median(2 * c / (a + b) for a, b, c in both)
        row['peak_mb'] = peak_memory(windows[side])
        rows.append({k: round(v, 5 if 'seconds' in k else 2) if isinstance(v, float) else v for k, v in row.items()})
    return rows


def show(rows: list[dict], verdict: bool = True) -> None:
    """The table and, at full size, whether each target is met."""
    for r in rows:
        line = f'{r["side"]:>4}x{r["side"]:<4} {r["us_per_token"]:6.1f} us per token  {r["peak_mb"]:8.1f} MB'
        line += f'  {1e3 * r["peak_mb"] / r["tokens"]:6.2f} kB per token'
        if r['speedup'] != '':
            line += f'  {r["speedup"]:6.2f}x as fast as SDPA'
        if r['promised'] != '':
            line += f' (target {r["promised"]}: {"met" if r["speedup"] >= r["promised"] else "MISSED"})'
        print(line)
    costs = [r['us_per_token'] for r in rows]
    spread = max(costs) / min(costs)
    target = f' (target {SPREAD}: {"met" if spread <= SPREAD else "MISSED"})' if verdict else ''
    print(f'time per token, largest over smallest: {spread:.3f}{target}')


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    n = [r['tokens'] for r in rows]
    axes[0].plot(n, [r['seconds'] for r in rows], 'o-', label='window, bias constant beyond 13 tokens')
    beside = [(r['tokens'], r['sdpa_seconds']) for r in rows if r['sdpa_seconds'] != '']
    axes[0].plot(*zip(*beside), 's-', label='SDPA without bias')
    axes[0].set(xscale='log', yscale='log', xlabel='tokens', ylabel='seconds, forward')
    axes[0].legend(loc='upper left')
    costs = [r['us_per_token'] for r in rows]
    axes[1].plot(n, costs, 'o-')
    axes[1].set(xscale='log', xlabel='tokens', ylabel='µs per token', ylim=(0, 1.2 * max(costs)))
    for axis in axes:
        axis.set_xticks(n, [f'{r["side"]}×{r["side"]}' for r in rows])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.suptitle('12 heads, D=64, M=32, float32, two CPU cores; feature maps included')
    figure.tight_layout()
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    args = options(__doc__).parse_args(argv)
    report = Report.of(args, 'window')
    sides, rounds = (QUICK, 2) if args.quick else (FULL, ROUNDS)
    with tqdm(total=len(sides) * (rounds + 1) + 3 * sum(beside for beside, _ in sides.values())) as bar:
        rows = measure(sides, rounds, bar)
    report.banner()
    show(rows, verdict=not args.quick)
    report.save({'window': rows}, {'window': lambda path: plot(rows, path)})


if __name__ == '__main__':
    main()
