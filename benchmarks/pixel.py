"""The pixel transformer: cached decoding beside recomputation, and a training step beside softmax.

python -m benchmarks.pixel            3072 bytes, a quarter of an hour on two cores; writes to a new folder in output/
python -m benchmarks.pixel --quick    small models; writes nothing unless --output says where
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from tqdm import tqdm

import nprf_vit  # noqa: F401  registers the models
from benchmarks.measure import in_child, interleave, peak_memory, ratio
from benchmarks.report import Report, options, save_figure
from nprf_vit.models.pixel import to_raster
from nprf_vit.models.pixel_generation import PixelDecoder

NPRF, PRF, SOFTMAX = 'nprf_pixel_imagenet32', 'prf_pixel_imagenet32', 'softmax_pixel_imagenet32'


@dataclass
class Size:
    """How much to measure; targets are what we hold ourselves to at full size."""

    model: dict
    decode_batch: int
    points: int  # lengths at which recomputation is timed
    train_batch: int
    rounds: int


FULL = Size({}, 16, 7, 2, 3)
QUICK = Size({'img_size': 8, 'embed_dim': 64, 'num_heads': 2, 'depth': 2}, 2, 4, 2, 2)


def decode_seconds(name: str, size: Size) -> np.ndarray:
    """Seconds of each byte when images are decoded side by side from a cache."""
    torch.manual_seed(0)
    model = timm.create_model(name, **size.model).eval()
    decoder, last, seconds = PixelDecoder(model, size.decode_batch), None, []
    for _ in tqdm(range(model.length), desc=f'{name}, cached'):
        start = time.perf_counter()
        last = decoder.step(last).argmax(-1)
        seconds.append(time.perf_counter() - start)
    return np.array(seconds)


def timed(model: torch.nn.Module, images: torch.Tensor) -> float:
    start = time.perf_counter()
    model(images)
    return time.perf_counter() - start


def recompute_seconds(name: str, size: Size) -> tuple[list[int], list[float]]:
    """Seconds of one forward over the first t bytes, which is what byte t costs without a cache, at some t."""
    total = timm.create_model(name, **size.model, device='meta').length
    lengths = sorted({max(1, round(t)) for t in np.linspace(1, total, size.points)})
    seconds = []
    for t in tqdm(lengths, desc=f'{name}, recomputed'):
        model = timm.create_model(name, **size.model, length=t).eval()
        images = torch.randint(256, (size.decode_batch, 3, *model.img_size), dtype=torch.uint8)
        with torch.inference_mode():
            # the faster of two: a neighbour can only add to the time, and here that would flatter the cache
            seconds.append(min(timed(model, images) for _ in range(2)))
    return lengths, seconds


def train_step(name: str, size: Size):
    """A function of no arguments that runs forward, loss and backward of one batch."""
    torch.manual_seed(0)
    model = timm.create_model(name, **size.model).train()
    images = torch.randint(256, (size.train_batch, 3, *model.img_size), dtype=torch.uint8)

    def step():
        model.zero_grad()
        F.cross_entropy(model(images).flatten(0, 1), to_raster(images).flatten().long()).backward()

    return step


def fields(what: str, model: str, seconds: float | str, value: float, target: str, kept: bool | str) -> dict:
    seconds = seconds if seconds == '' else float(f'{seconds:.4g}')
    return {
        'what': what,
        'model': model,
        'seconds': seconds,
        'value': float(f'{value:.4g}'),
        'target': target,
        'kept': kept,
    }


def measure_decoding(size: Size) -> tuple[list[dict], dict]:
    """Rows and curves: the whole sequence cached and recomputed, and the growth of the cost per byte."""
    cached = decode_seconds(NPRF, size)
    lengths, again = recompute_seconds(NPRF, size)
    # trapezoids between the sampled lengths: the cost is smooth in t, linear and then quadratic
    recomputed = float(np.trapezoid(again, lengths)) + again[0]
    gain = recomputed / cached.sum()
    flat = decode_seconds(PRF, size)
    quarter = len(flat) // 4
    growth = {
        name: float(np.median(s[-quarter:]) / np.median(s[:quarter])) for name, s in ((NPRF, cached), (PRF, flat))
    }
    rows = [
        fields(f'decode {size.decode_batch} images, cached', NPRF, float(cached.sum()), 1.0, '', ''),
        fields('the same, recomputed per byte / cached', NPRF, recomputed, gain, '>= 100', gain >= 100),
        fields('last quarter / first quarter per byte, bias', NPRF, float(cached.mean()), growth[NPRF], '', ''),
        fields(
            'last quarter / first quarter per byte, no bias',
            PRF,
            float(flat.mean()),
            growth[PRF],
            '<= 1.1',
            growth[PRF] <= 1.1,
        ),
    ]
    points = [fields(f'one forward over {t} bytes', NPRF, s, s, '', '') for t, s in zip(lengths, again)]
    return rows + points, {'cached': cached, 'no bias': flat, 'recomputed': (lengths, again)}


def measure_training(size: Size, quick: bool) -> list[dict]:
    """Time and memory of a training step in units of those of softmax with the same bias."""
    child = ('--quick',) if quick else ()
    memory = {name: in_child('benchmarks.pixel', '--child', name, *child) for name in (NPRF, SOFTMAX)}
    steps = {name: train_step(name, size) for name in (NPRF, SOFTMAX)}
    with tqdm(total=2 * size.rounds + 2, desc='training steps') as progress:
        seconds = interleave(steps, size.rounds, progress)
    times, share = ratio(seconds, NPRF, SOFTMAX), memory[NPRF] / memory[SOFTMAX]
    rows = [fields('peak MB of a training step', name, '', memory[name], '', '') for name in memory]
    return [
        *(fields('training step', name, statistics.median(s), 1.0, '', '') for name, s in seconds.items()),
        fields('training time / softmax', NPRF, '', times, '<= 1.1', times <= 1.1),
        *rows,
        fields('peak memory / softmax', NPRF, '', share, '<= 0.5', share <= 0.5),
    ]


def show(rows: list[dict], verdict: bool) -> None:
    """The table and, at full size, whether each target is met."""
    for row in rows:
        line = f'{row["what"]:<48}{row["model"]:<26}{row["seconds"]!s:>10}{row["value"]:>10}'
        if verdict and row['target']:
            line += f' (target {row["target"]}: {"met" if row["kept"] else "MISSED"})'
        print(line)


def plot(curves: dict, path: Path) -> None:
    """Milliseconds per byte against its position."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout='constrained')
    axes = figure.subplots()
    for name, label in (('cached', 'cached, with bias'), ('no bias', 'cached, no bias')):
        smooth = np.array([np.median(part) for part in np.array_split(curves[name], 48)])
        axes.plot(np.linspace(0, len(curves[name]), 48), smooth * 1e3, label=label)
    lengths, again = curves['recomputed']
    axes.plot(lengths, np.array(again) * 1e3, 'o-', label='recomputed, with bias')
    axes.set(yscale='log', xlabel='bytes so far', ylabel='ms per byte (all images of the batch)')
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path, 150)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument('--only', choices=('decoding', 'training'), help='one half of it')
    parser.add_argument('--child', help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    size = QUICK if args.quick else FULL
    if args.child:
        print(json.dumps(peak_memory(train_step(args.child, size))))
        return
    report = Report.of(args, 'pixel')
    for part in ('training', 'decoding'):
        if args.only in (None, part):
            plots = {}
            if part == 'training':
                rows = measure_training(size, args.quick)
            else:
                rows, curves = measure_decoding(size)
                plots['pixel'] = partial(plot, curves)
            if args.quick:
                rows = [row | {'target': '', 'kept': ''} for row in rows]  # targets are about the full size
            report.banner()
            show(rows, verdict=not args.quick)
            report.save({f'pixel_{part}': rows}, plots)


if __name__ == '__main__':
    main()
