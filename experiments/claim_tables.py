"""The documents' tables about the paper's claims, each from its CSV file in docs/results."""

from benchmarks import report
from benchmarks.report import read_csv
from experiments import (
    ablations,
    bias_ablation,
    bits_per_dim,
    canvases,
    conversion,
    high_resolution,
    image_table,
    language,
    ordering,
    stability,
)
from experiments.runs import Table


def shipped(name: str) -> Table:
    return Table(report.RESULTS / f'{name}.csv', ())


def approximation() -> list[dict]:
    found = {(r['radius'], r['kind'], r['m']): r['median'] for r in read_csv(report.RESULTS / 'approximation.csv')}
    columns = [('prf', 16), ('prf', 64), ('prf', 1024), ('orf', 64), ('sphere', 64), ('trf', 64)]
    return [
        {'R': radius, **{f'{kind}, m={m}': f'{found[radius, kind, m]:.2f}' for kind, m in columns}}
        for radius in (1, 2, 3, 4)
    ]


def power(value: float) -> str:
    digits, exponent = f'{value:.1e}'.split('e')
    return f'{digits}e{int(exponent)}'


def approximation_samples() -> list[dict]:
    return [
        {
            'R': f'{r["radius"]:g}',
            "the paper's Theorem 3": power(r['theorem_3']),
            'our bound, any tokens': power(r['any_tokens']),
            'our bound, these tokens': power(r['these_tokens']),
            f'found by doubling m, {r["seeds"]} seeds': r['measured'],
        }
        for r in read_csv(report.RESULTS / 'approximation_samples.csv')
        if r['radius'] <= 3
    ]


def conversions(name: str) -> list[dict]:
    chosen = {'model', 'R', 'softmax', *(f'm = {m}' for m in (4, 16, 32, 64, 256, 1024))}
    return [{k: v for k, v in row.items() if k in chosen} for row in conversion.report(shipped(name))]


def orders() -> list[dict]:
    names = {'top-1': '600 steps', 'three times as long': '1800 steps, three runs'}
    return [{names.get(k, k): v for k, v in row.items()} for row in ordering.report(shipped('ordering'))]


def codecs() -> list[dict]:
    found = {(row['way'], row['pixels']): row['bits_per_dim'] for row in read_csv(report.RESULTS / 'codecs.csv')}
    bits = {way: {f'{s}×{s} px': f'{found[way, f"{s}x{s}"]:.2f}' for s in (16, 32)} for way, _ in found}
    return [{'without a network': way, **both} for way, both in bits.items()]


def without_empty_columns(rows: list[dict]) -> list[dict]:
    """Of stages that were not run."""
    return [{k: v for k, v in row.items() if any(each[k] for each in rows)} for row in rows]


def resolutions(images: str) -> list[dict]:
    rows = high_resolution.report(shipped('high_resolution'))
    return [{k: v for k, v in row.items() if k != 'images'} for row in rows if row['images'] == images]


def cell_borders() -> list[dict]:
    names = {
        'way': 'bias',
        'border_energy': 'steps at borders / within',
        'from_interpolate': 'distance from interpolate',
    }
    return [
        {'image side': f'{r["pixels"]} px', **{said: r[key] for key, said in names.items()}, 'top-1': r['top1']}
        for r in read_csv(report.RESULTS / 'cell_borders.csv')
    ]


def cell_photograph() -> list[dict]:
    names = {
        'way': 'bias',
        'border_energy': 'steps at borders / within',
        'from_interpolate': 'distance from interpolate',
    }
    rows = read_csv(report.RESULTS / 'cell_photograph.csv')
    return [{said: row[key] for key, said in names.items()} for row in rows]


TABLES = {
    'approximation': approximation,
    'approximation_samples': approximation_samples,
    'conversion': lambda: conversions('conversion'),
    'conversion_cifar10': lambda: conversions('conversion_cifar10'),
    'ablations': lambda: ablations.report(shipped('ablations')),
    'ordering': orders,
    'image_table': lambda: image_table.report(shipped('image_table')),
    'bits_per_dim_cifar10': lambda: bits_per_dim.report(shipped('bits_per_dim_cifar10')),
    'codecs': codecs,
    'bias_ablation': lambda: without_empty_columns(bias_ablation.report(shipped('bias_ablation'))),
    'stability_cifar10': lambda: stability.report(shipped('stability_cifar10')),
    'stability': lambda: stability.report(shipped('stability')),
    'bits_per_dim': lambda: bits_per_dim.report(shipped('bits_per_dim')),
    'high_resolution_cifar10': lambda: resolutions('CIFAR-10'),
    'high_resolution_fashion_mnist': lambda: resolutions('Fashion-MNIST'),
    'canvases': lambda: canvases.report(shipped('canvases')),
    'cell_borders': cell_borders,
    'cell_photograph': cell_photograph,
    **{name: language.shipped_table(name) for name in language.EXPERIMENTS},
}
