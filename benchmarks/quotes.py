"""Figures that stand in the documents' sentences: the words around them, and where they come from.

`{}` stands for a number. `python -m benchmarks.tables` replaces it; a sentence that is reworded is reworded here too.
"""

import statistics

from benchmarks import models
from benchmarks.length import SDPA, STORED
from benchmarks.speed_tables import rows

FORWARD, BOTH = 'sequence, forward', 'sequence, forward+backward'


def times_sdpa(n: int = 40960) -> str:
    found = {(r['panel'], r['n'], r['contender'], r['m']): r['seconds'] for r in rows('length')}
    return f'{found[FORWARD, n, SDPA, ""] / found[FORWARD, n, "auto", 32]:.1f}'


def exponent(panel: str, contender: str, m: int | str = '') -> str:
    found = {(r['panel'], r['contender'], r['m']): r['time'] for r in rows('length_exponents')}
    return f'{found[panel, contender, m]:.2f}'


def error(radius: float, m: int) -> str:
    found = {(r['radius'], r['kind'], r['m']): r['median'] for r in rows('approximation')}
    return f'{found[radius, "prf", m]:.2f}'


def converted(model: str) -> tuple[str, str]:
    """Top-1 on CIFAR-10 before and after the switch to 64 features."""
    tops = {
        m: [r['top1'] for r in rows('conversion_cifar10') if (r['model'], r['features']) == (model, m)] for m in (0, 64)
    }
    return tuple(f'{statistics.fmean(values):.1f}' for values in tops.values())


def mean(table: str, column: str, variant: str, digits: int) -> str:
    return f'{statistics.fmean(r[column] for r in rows(table) if r["variant"] == variant):.{digits}f}'


def on_cifar10(*variants: str) -> list[str]:
    """Top-1 of the image table after 20 epochs."""
    tops = [[r['top1'] for r in rows('image_table') if (r['model'], r['stage']) == (v, 'test')] for v in variants]
    return [f'{statistics.fmean(values):.1f}' for values in tops]


def bits(*variants: str) -> list[str]:
    """Bits per dimension of CIFAR-10 at 16×16 pixels."""
    return [mean('bits_per_dim_cifar10', 'ema_bpd', f'pixel_{variant}_cifar10', 2) for variant in variants]


def last_epoch(run: str) -> list[str]:
    return [f'{rows(f"{run}/summary")[-1]["top1"]:.2f}']


def training_memory() -> list[str]:
    found = {(r['case'], r['contender']): r['peak_mb'] for r in rows('attention')}
    return [f'{found["64x64, peak memory, forward+backward", name]:.0f}' for name in ('sdpa', 'direct', 'fft')]


def beside_plain_fft() -> list[str]:
    found = {r['contender']: r for r in rows('attention') if r['case'] == '48x48, beside the plain FFT'}
    plain = found['plain fft']['peak_mb']
    each = ((1 / found[name]['ratio'], plain / found[name]['peak_mb']) for name in ('fft', 'auto'))
    return [f'{value:.0f}' for pair in each for value in pair]


def decoding() -> list[str]:
    cached, recomputed = rows('pixel_decoding')[:2]
    return [f'{cached["seconds"]:.0f}', f'{recomputed["value"]:.0f}']


def model_row(name: str, pixels: int, mode: str = 'inference') -> dict:
    return next(r for r in rows('models') if (r['model'], r['pixels'], r['mode']) == (name, pixels, mode))


def speed(name: str, pixels: int, mode: str = 'inference') -> str:
    return f'{model_row(name, pixels, mode)["speed_over_deit"]:.2f}'


def extra_memory() -> list[str]:
    """Percent of DeiT's memory that ours takes besides, at the worst resolution."""
    sizes = {r['pixels'] for r in rows('models') if r['model'] == models.DEIT}
    shares = (model_row(models.OURS, px)['peak_mb'] / model_row(models.DEIT, px)['peak_mb'] for px in sizes)
    return [f'{100 * max(shares) - 100:.0f}']


def cells_over_deit() -> list[str]:
    return [speed(models.CELLS, pixels) for pixels in (1024, 2048)]


def cells_over_swin() -> list[str]:
    keys = ((pixels, name) for pixels in (1024, 1536, 2048) for name in (models.SWIN, models.CELLS))
    seconds = [model_row(name, pixels)['seconds'] for pixels, name in keys]
    return [f'{theirs / ours:.2f}' for theirs, ours in zip(seconds[::2], seconds[1::2])]


def over_extended(pixels: int, key: str = 'speed_over_deit') -> float:
    """Of Swin's in units of our extended model's."""
    return model_row(models.SWIN, pixels)[key] / model_row(models.EXTENDED, pixels)[key]


def swin() -> list[str]:
    speeds = [f'{over_extended(pixels):.2f}' for pixels in (1024, 2048)]
    return [*speeds, f'{over_extended(2048, "peak_mb"):.1f}']


def at_2048() -> list[str]:
    extended, deit, ours = (model_row(name, 2048) for name in (models.EXTENDED, models.DEIT, models.OURS))
    numbers = [f'{extended["seconds"]:.0f}', extended['peak_mb'], f'{deit["seconds"]:.0f}', deit['peak_mb']]
    return [*numbers, f'{extended["speed_over_deit"]:.2f}', f'{ours["seconds"]:.0f}']


def passes() -> list[str]:
    """Seconds of one pass over each number of bytes."""
    found = [r['seconds'] for r in rows('pixel_decoding')[4:]]
    return [f'{value:#.2g}' if value < 10 else f'{value:.1f}' for value in found]


def per_byte(index: int) -> list[str]:
    row = rows('pixel_decoding')[index]
    return [f'{1e3 * row["seconds"]:.0f}', f'{row["value"]:.2f}']


def layer(grid: str, contender: str, key: str = 'time_of_ours') -> float:
    """Of ours in units of the contender's, forward."""
    wanted = (grid, 'forward', contender)
    return next(r[key] for r in rows('peers') if (r['grid'], r['mode'], r['contender']) == wanted)


def layer_wins() -> list[str]:
    pairs = (('96x96', 'sdpa, bias as mask'), ('128x128', 'flex attention, bias'))
    return [f'{1 / layer(*pair):.1f}' for pair in pairs]


def layer_losses() -> list[str]:
    mask = [layer('14x14', 'sdpa, bias as mask', key) for key in ('time_of_ours', 'memory_of_ours')]
    return [f'{mask[0]:.2f}', f'{mask[1]:.1f}']


def zoo(name: str) -> list[str]:
    row = next(r for r in rows('zoo') if r['entry point'] == name)
    return [f'{row["parameters, M"]:.2f}', f'{row["GMACs at its own size"]:.2f}']


ZOO = ('nprf_deit_tiny', 'nprf_deit_small', 'nprf_deit_base', 'nprf_deit_base_patch8', 'nprf_deit_base_patch32')
ZOO += ('nprf_deit_base_distilled', 'nprf_deit_large')
ZOO += ('nprf_deit_base_norpe', 'prf_deit_base', 'softmax_deit_base')
QUOTES = {
    'README.md': {
        '{} and {} times as fast as that DeiT at 1024 and 2048 px, and 4096 px': cells_over_deit,
        'the model with cells is {} and {} times as fast as Swin there': lambda: cells_over_swin()[::2],
        'inference takes at most {} % more memory than a DeiT without any bias': extra_memory,
        'n^{} and n^{}; {} times as fast at 40,960 tokens': lambda: [
            exponent(FORWARD, SDPA),
            exponent(FORWARD, 'fft', 32),
            times_sdpa(),
        ],
        '{} from 16 features at norm 1, {} from 1024 at norm 2': lambda: [error(1, 16), error(2, 1024)],
        'normalized with bias {} → {}, normalized {} → {}, standard {} → {}, with bias {} → {}': lambda: [
            *converted('nsoftmax_bias_fast'),
            *converted('nsoftmax'),
            *converted('softmax'),
            *converted('softmax_bias_fast'),
        ],
        'CIFAR-10, 20 epochs: {}, {}, {}, {}, all': lambda: on_cifar10('softmax', 'nprf_bias_fast', 'prf', 'nprf'),
        'CIFAR-10 at 16×16 pixels: {}, {} |': lambda: bits('nprf_bias_fast', 'prf'),
        'With one learning rate it has {} top-1 and {} bits/dim.': lambda: [
            *on_cifar10('nprf_bias'),
            *bits('nprf_bias'),
        ],
        'digits, 360 held out: top-1 {} |': lambda: last_epoch('digits'),
        'Fashion-MNIST: top-1 {} after the last epoch': lambda: last_epoch('fashion_mnist'),
        'CIFAR-10, 0.49 M parameters, 56 minutes of one core: top-1 {} |': lambda: last_epoch('cifar10'),
        'One training step at 224 px, batch 8: {}× the': lambda: [speed(models.OURS, 224, 'training')],
        'is {} times as fast as the extended model at 1024 px and {} times at 2048 px, in {} times its memory': swin,
        **{f'| `{name}` | {{}} M | {{}} |': (lambda name=name: zoo(name)) for name in ZOO},
        '| `nprf_deit_base_384` | {} M | {} at 384 px |': lambda: zoo('nprf_deit_base_384'),
    },
    'results.md': {
        'processes, 40 epochs): **{}** top-1': lambda: last_epoch('cifar10'),
        'above its inputs: {} MB (SDPA, no bias), {} MB (`direct`), {} MB (`fft`)': training_memory,
        '`fft` is {}× faster in 1/{} of the memory, `auto` {}× faster in 1/{}.': beside_plain_fft,
        'with 32 features {} times as fast as SDPA at 40,960 tokens': lambda: [times_sdpa()],
        'SDPA {}, the stored matrix {}, `fft` {} to {} forward and {} forward+backward': lambda: [
            exponent(FORWARD, SDPA),
            exponent(FORWARD, STORED),
            *(f(exponent(FORWARD, 'fft', m) for m in (16, 32, 64)) for f in (min, max)),
            exponent(BOTH, 'fft', 32),
        ],
        'ours is faster from 32×32 on: {} times at 96×96 beside the mask, {} times at 128×128 beside': layer_wins,
        'at 14×14 forward beside the mask ({} times its time, {} times its memory; forward+backward': layer_losses,
        'With cells it is {} times as fast as that DeiT at 1024 px and {} times at 2048 px': cells_over_deit,
        'The model with cells is {}, {} and {} times as fast as Swin at 1024, 1536 and 2048 px': cells_over_swin,
        '`fft`, ours is {} times as fast in {} % more memory': lambda: [speed(models.OURS, 2048), *extra_memory()],
        'is {} times as fast as our extended model at 1024 px': lambda: swin()[:1],
        'at 2048 px the extended model is {} times as fast as Swin': lambda: [f'{1 / over_extended(2048):.2f}'],
    },
    'pixel.md': {
        '| cached | {} s |': lambda: decoding()[:1],
        'integrated from 7 lengths | {} s, {} times as long |': lambda: [
            f'{rows("pixel_decoding")[1]["seconds"]:,.0f}',
            decoding()[1],
        ],
        'the same with a bias ({} ms per byte) | {} |': lambda: per_byte(2),
        '(`prf_pixel_imagenet32`, {} ms per byte) | {} |': lambda: per_byte(3),
        'the faster of two each: {}, {}, {}, {}, {}, {}, {}.': passes,
    },
    'high_resolution.md': {
        "takes {} s and {} MB, timm's `deit_base_patch16_224` {} s and {} MB, {} times as long; the": (
            lambda: at_2048()[:5]
        ),
        'interpolated one takes {} s. timm': lambda: at_2048()[5:],
    },
}
