"""Our attention layer beside what a user would take instead: time and peak memory, forward and training step.

python -m benchmarks.peers            14x14 to 128x128 tokens, 14 minutes; writes to a new folder in output/
python -m benchmarks.peers --quick    small grids; writes nothing unless --output says where

12 heads, head dim 64, 32 features, float32, feature maps included. The Performer is the package performer-pytorch and
is reported as not installed where it is. Whole models are in benchmarks.models.

# B batch, K heads, N tokens, M features, D head dim
"""

import importlib.util
import statistics
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from tqdm import tqdm

from benchmarks.layer import Layer, Run, plain_fft
from benchmarks.measure import NO_FIT, memory_and_time, memory_limit, ratio
from benchmarks.report import Report, by_size, options, save_figure
from nprf_vit.ops import reference

OURS, WINDOW, LINEAR = 'ours', 'ours, window of radius 13', 'ours, no bias'
PERFORMER = 'performer-pytorch, no bias'
MISSING = 'not installed'
NO_BACKWARD = 'no gradients on CPU'


@dataclass
class Case:
    """One grid; `backward` adds the gradients of queries, keys, values and bias."""

    side: int
    rounds: int
    batch: int = 1
    heads: int = 12
    backward: bool = False

    @property
    def mode(self) -> str:
        return 'forward+backward' if self.backward else 'forward'


FULL = [
    Case(14, 20, batch=8),
    Case(32, 10),
    Case(64, 5),
    Case(96, 3),
    Case(128, 2),
    Case(14, 10, batch=8, backward=True),
    Case(32, 5, backward=True),
    Case(64, 3, backward=True),
    Case(96, 1, backward=True),
]
QUICK = [Case(8, 2, heads=2), Case(6, 2, heads=2, backward=True)]


def softmax_with_bias(layer: Layer) -> Run:
    """SDPA with the bias as a dense mask, gathered from the table in every call as timm's relative ViTs do."""
    height, width = layer.grid
    dy, dx = reference.offsets(layer.n, layer.grid)
    index = ((dy + height - 1) * (2 * width - 1) + dx + width - 1).flatten()  # N·N

    def attend():
        mask = layer.bias.flatten(1)[:, index].unflatten(1, (layer.n, layer.n))  # K, N, N
        return F.scaled_dot_product_attention(layer.q, layer.k, layer.v, attn_mask=mask.unsqueeze(0))

    return layer.run(attend, bias=True)


def flex_with_bias(layer: Layer) -> Run:
    """FlexAttention, compiled, with the bias looked up inside: softmax attention without a stored matrix."""
    height, width = layer.grid
    compiled = torch.compile(flex_attention, dynamic=False)

    def score_mod(score, b, h, q, k):
        dy, dx = k // width - q // width, k % width - q % width
        return score + layer.bias[h, dy + height - 1, dx + width - 1]

    return layer.run(lambda: compiled(layer.q, layer.k, layer.v, score_mod=score_mod), bias=True)


def performer(layer: Layer) -> Run:
    """Attention of the package performer-pytorch, which has no relative bias."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # it imports names that torch is about to drop
        from performer_pytorch import FastAttention
    attention = FastAttention(dim_heads=layer.d, nb_features=layer.m, causal=False)
    return layer.run(lambda: attention(layer.q, layer.k, layer.v))


def public_fft(layer: Layer) -> Run:
    return layer.run(lambda: plain_fft(*layer.features(), layer.v, layer.bias, layer.grid), bias=True)


def contenders(case: Case) -> dict[str, Run | str]:
    """Functions of no arguments, or the reason why there is none."""
    layer = Layer((case.side, case.side), 0, case.batch, case.heads, backward=case.backward)
    torch.compiler.reset()  # a compiled function per size, or dynamo tries to generalise over them
    installed = importlib.util.find_spec('performer_pytorch') is not None
    return {
        OURS: layer.ours(),
        WINDOW: layer.ours_window(13),
        LINEAR: layer.ours_without_bias(),
        'sdpa, no bias': layer.sdpa(),
        'sdpa, bias as mask': softmax_with_bias(layer),
        'flex attention, bias': NO_BACKWARD if case.backward else flex_with_bias(layer),
        PERFORMER: performer(layer) if installed else MISSING,
        'straightforward fft': public_fft(layer),
    }


def measure(case: Case, bar) -> list[dict]:
    """A row per contender: median seconds, peak memory, and ours in units of it (above 1: we lose)."""
    bar.set_description(f'{case.side}x{case.side}, {case.mode}')
    peaks, seconds = memory_and_time(contenders(case), case.rounds, bar)
    rows = []
    for name, peak in peaks.items():
        row = {'grid': f'{case.side}x{case.side}', 'batch': case.batch, 'mode': case.mode, 'contender': name}
        if name in seconds:
            row.update(seconds=f'{statistics.median(seconds[name]):.5f}', peak_mb=f'{peak:.1f}')
            row['time_of_ours'] = f'{ratio(seconds, OURS, name):.3f}'
            row['memory_of_ours'] = f'{peaks[OURS] / peak:.3f}' if peak else ''
        else:
            row.update(seconds=peak, peak_mb=peak, time_of_ours='', memory_of_ours='')
        rows.append({**row, 'rounds': len(seconds.get(name, []))})
    return rows


def losses(rows: list[dict]) -> list[str]:
    """Where ours, with its bias, takes longer or more memory than a peer."""
    lines = []
    for key, what in (('time_of_ours', 'time'), ('memory_of_ours', 'memory')):
        for r in rows:
            if r['contender'] not in (OURS, WINDOW, LINEAR) and r[key] and float(r[key]) > 1:
                lines.append(f'{r["grid"]}, {r["mode"]}: {float(r[key]):.2f}x the {what} of {r["contender"]}')
    return lines


def plot(rows: list[dict], path: Path) -> None:
    """Time and memory per batch item against tokens; a cross on the upper edge marks what does not fit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout='constrained')
    axes = figure.subplots(2, 2)
    names = list(dict.fromkeys(r['contender'] for r in rows))
    for column, mode in enumerate(('forward', 'forward+backward')):
        for axis, (key, label) in zip(
            axes[:, column], (('seconds', 'seconds per item'), ('peak_mb', 'peak MB per item'))
        ):
            for i, name in enumerate(names):
                mine = [r for r in rows if r['contender'] == name and r['mode'] == mode]
                fits = [(int(r['grid'].split('x')[0]) ** 2, float(r[key]) / r['batch']) for r in mine if r['rounds']]
                style = {'color': f'C{i}', 'lw': 2.5 if name == OURS else 1.2}
                if fits:
                    axis.plot(*zip(*fits), 'o-', ms=3, label=name, **style)
                for r in mine:
                    if r[key] == NO_FIT:
                        tokens = int(r['grid'].split('x')[0]) ** 2
                        axis.plot(tokens, 0.97, 'x', transform=axis.get_xaxis_transform(), **style)
            axis.set(xscale='log', yscale='log', xlabel='tokens (× does not fit)', ylabel=label, title=mode)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument('--limit', type=float, default=12.0, help='memory in GB beyond which a contender does not fit')
    args = parser.parse_args(argv)
    report = Report.of(args, 'peers')
    cases = QUICK if args.quick else FULL
    rows = []
    with tqdm(total=sum(8 * (c.rounds + 1) for c in cases)) as bar, memory_limit(args.limit):
        for case in cases:
            rows += measure(case, bar)
    for mode in dict.fromkeys(case.mode for case in cases):
        mine = [r for r in rows if r['mode'] == mode]
        report.table(by_size(mine, lambda r: r['contender'], 'grid'), mode)
    report.banner()
    print('where we lose:', *(losses(rows) or ['nowhere']), sep='\n  ')
    report.save({'peers': rows}, {'peers': lambda path: plot(rows, path)})


if __name__ == '__main__':
    main()
