"""Attention alone, beside scaled_dot_product_attention and the FFT that public code offers.

python -m benchmarks.attention              all sizes, about 9 minutes on two cores; writes to a new folder in output/
python -m benchmarks.attention --quick      small sizes, seconds; writes nothing unless --output says where
python -m benchmarks.attention --constants  only the constant of the cost model; writes nothing

# B batch, K heads, N tokens, M features, D head dim
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.layer import Layer, plain_fft
from benchmarks.measure import interleave, peak_memory, ratio
from benchmarks.report import Report, options, save_figure
from nprf_vit.ops import choose_backend, kernel_attention
from nprf_vit.ops.dispatch import fitted_fft_point

M, D = 32, 64
BOTH = 192**2  # up to here direct and fft are both timed, beyond only the one that auto takes


@dataclass
class Case:
    """One size; `target` is the largest ratio to the first contender that we hold ourselves to."""

    side: int | None
    rounds: int
    target: float | None
    batch: int = 1
    heads: int = 12
    length: int = 0  # of a causal sequence, instead of a grid
    backward: bool = False
    sdpa: bool = True
    window: float | None = None  # target for a bias that is constant beyond 13 tokens

    @property
    def n(self):
        return self.length or self.side**2

    @property
    def contenders(self):
        return self.sdpa + bool(self.length) + (3 if self.n <= BOTH else 2) + (self.window is not None)

    @property
    def name(self):
        size = f'causal {self.length}' if self.length else f'{self.side}x{self.side}'
        return f'{size}, batch {self.batch}, {"forward+backward" if self.backward else "forward"}'


FULL = [
    Case(14, 30, 1.25, batch=8),
    Case(32, 15, 1.15),
    Case(64, 7, 1.15, window=0.5),
    Case(96, 7, 1.15, window=0.25),
    Case(128, 5, 1.15, window=0.111),
    Case(192, 1, 0.6, window=0.05),
    Case(256, 1, None, sdpa=False, window=0.0),
    Case(32, 9, 1.4, backward=True),
    Case(64, 9, 1.4, backward=True),
    Case(None, 9, 1.15, heads=8, length=3072),
]
QUICK = [Case(12, 2, None, window=0.0), Case(8, 2, None, backward=True), Case(None, 2, None, heads=2, length=600)]


def contenders(case: Case) -> dict:
    """Functions of no arguments, SDPA first; ours include the feature maps."""
    causal = bool(case.length)
    grid = None if causal else (case.side, case.side)
    layer = Layer(grid, case.length, case.batch, case.heads, M, D, causal, case.backward)
    runs = {}
    if case.sdpa and case.side == 14:  # the size at which a float mask is how people add a bias
        runs['sdpa, float mask'] = layer.sdpa(torch.randn(1, case.heads, case.n, case.n))
    elif case.sdpa:
        runs['sdpa'] = layer.sdpa()
    if causal:
        future = torch.ones(case.n, case.n).triu(1) > 0
        mask = torch.randn(1, case.heads, case.n, case.n).masked_fill(future, -torch.inf)
        runs['sdpa, causal bias mask'] = layer.sdpa(mask)
    chosen = choose_backend(grid or (1, case.n), M, D, causal, True)
    for backend in ('direct', 'fft'):
        if case.n <= BOTH or backend == chosen:
            runs[backend] = layer.ours(backend)
    runs['auto'] = layer.ours('auto')
    if case.window is not None:
        runs['window, radius 13'] = layer.ours_window(13)
    return runs


def against_plain_fft(side: int, rounds: int, bar) -> list[dict]:
    """Time and peak memory beside the plain FFT."""
    torch.manual_seed(0)
    phi_q, phi_k = (torch.rand(1, 12, side**2, M) for _ in range(2))
    v, bias = torch.randn(1, 12, side**2, D), torch.randn(12, 2 * side - 1, 2 * side - 1) * 0.02
    grid = (side, side)
    runs = {'plain fft': lambda: plain_fft(phi_q, phi_k, v, bias, grid)}
    for backend in ('auto', 'fft'):
        runs[backend] = lambda b=backend: kernel_attention(phi_q, phi_k, v, bias, grid_size=grid, backend=b)
    error = max((runs['plain fft']() - runs[name]()).abs().max().item() for name in ('auto', 'fft'))
    if error > 1e-3:
        raise RuntimeError(f'the plain FFT disagrees with ours by {error:.1e}')
    seconds = interleave(runs, rounds, bar)
    return [
        row(f'{side}x{side}, beside the plain FFT', side**2, name, seconds, 'plain fft', None, peak_memory(run))
        for name, run in runs.items()
    ]


def memory(side: int) -> list[dict]:
    """Peak memory of one forward+backward above its inputs."""
    runs = contenders(Case(side, 1, None, backward=True))
    return [
        {**blank(f'{side}x{side}, peak memory, forward+backward', side**2, name), 'peak_mb': round(peak_memory(run), 1)}
        for name, run in runs.items()
    ]


def blank(case, n, name):
    return {'case': case, 'n': n, 'contender': name, 'seconds': '', 'ratio': '', 'target': '', 'peak_mb': ''}


def row(case, n, name, seconds, base, target, peak=None):
    return {
        **blank(case, n, name),
        'seconds': f'{min(seconds[name]):.5f}',
        'ratio': f'{ratio(seconds, name, base):.3f}' if base else '',
        'target': target or '',
        'peak_mb': '' if peak is None else round(peak, 1),
    }


def constants(rows: list[dict]) -> list[str]:
    """The FFT_POINT that makes the cost model exact, at each size where both algorithms were timed."""
    times = {(r['n'], r['contender']): float(r['seconds']) for r in rows if r['case'].endswith('batch 1, forward')}
    lines = []
    for n in sorted({n for n, name in times if name == 'fft' and (n, 'direct') in times}):
        side = math.isqrt(n)
        if side**2 == n:
            point = fitted_fft_point((side, side), M, D, times[n, 'fft'], times[n, 'direct'])
            lines.append(f'FFT_POINT at {n} tokens: {point:.1f}')
    return lines


def plot(rows: list[dict], path: Path) -> None:
    """Time against tokens, and the ratio to SDPA."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    grids = [r for r in rows if r['case'].endswith('batch 1, forward') and 'x' in r['case']]
    for name in dict.fromkeys(r['contender'] for r in grids):
        mine = [(r['n'], float(r['seconds']), r['ratio']) for r in grids if r['contender'] == name]
        style = {
            'marker': 'o',
            'lw': 2.5 if name == 'auto' else 1.2,
            'ls': '--' if name == 'auto' else '-',
            'label': name,
        }
        axes[0].plot([n for n, _, _ in mine], [s for _, s, _ in mine], **style)
        paired = [(n, float(r)) for n, _, r in mine if r]
        axes[1].plot([n for n, _ in paired], [r for _, r in paired], **style)
    for axis, label in zip(axes, ('seconds, forward', 'time / SDPA without bias')):
        axis.set(xscale='log', xlabel='tokens', ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_yscale('log')
    axes[1].set_ylim(0, 3)
    axes[0].legend()
    figure.suptitle('12 heads, D=64, M=32, float32, two CPU cores; feature maps included')
    figure.tight_layout()
    save_figure(figure, path)


def measure(cases: list[Case], bar) -> list[dict]:
    rows = []
    for case in cases:
        runs = contenders(case)
        base = next(iter(runs)) if case.sdpa else None
        bar.set_description(case.name)
        seconds = interleave(runs, case.rounds, bar, warm_up=case.rounds > 1)
        targets = {'auto': case.target, 'window, radius 13': case.window}
        rows += [row(case.name, case.n, name, seconds, base, targets.get(name)) for name in runs]
    return rows


def show(rows: list[dict]) -> None:
    for r in rows:
        against = f'{r["ratio"]:>7}x' if r['ratio'] else ' ' * 8
        target = f'  target {r["target"]}x' if r['target'] else ''
        peak = f'  peak {r["peak_mb"]} MB' if r['peak_mb'] != '' else ''
        print(f'{r["case"]:45} {r["contender"]:24} {r["seconds"]:>9} s {against}{target}{peak}')


def main(argv=None) -> None:
    parser = options(__doc__)
    parser.add_argument('--constants', action='store_true', help='only what the cost model needs')
    args = parser.parse_args(argv)
    report = Report(None, args.quick) if args.constants else Report.of(args, 'attention')
    cases = QUICK if args.quick else FULL
    if args.constants:
        cases = [c for c in FULL if c.batch == 1 and c.side and 32 <= c.side <= 192 and not c.backward]
    calls = sum((c.rounds + (c.rounds > 1)) * c.contenders for c in cases)
    with tqdm(total=calls + (0 if args.constants else 9 if args.quick else 12)) as bar:
        rows = measure(cases, bar)
        if not args.constants:
            rows += against_plain_fft(*((8, 2) if args.quick else (48, 3)), bar)
            rows += memory(12 if args.quick else 64)
    report.banner()
    show(rows)
    print('\n'.join(constants(rows)))
    report.save({'attention': rows}, {'attention': lambda path: plot(rows, path)})


if __name__ == '__main__':
    main()
