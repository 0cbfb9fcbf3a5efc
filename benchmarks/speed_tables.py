"""The documents' tables of speed and memory, each from its CSV file in docs/results."""

from benchmarks import models, peers, report
from benchmarks.length import SDPA, STORED
from benchmarks.measure import NO_FIT
from benchmarks.report import by_size, read_csv, significant

ATTENTION = {  # case in the CSV file → row of the table
    '14x14, batch 8, forward': '14×14, batch 8, SDPA with a float mask',
    **{f'{side}x{side}, batch 1, forward': f'{side}×{side}' for side in (32, 64, 96, 128, 192)},
    **{f'{side}x{side}, batch 1, forward+backward': f'{side}×{side}, forward+backward' for side in (32, 64)},
    'causal 3072, batch 1, forward': '3072, causal, 8 heads (SDPA with a causal bias mask: {})',
}
MODELS = {
    models.OURS: '`nprf_deit_base`',
    models.EXTENDED: '`nprf_deit_base`, extended',
    models.CELLS: '`nprf_deit_base`, cells',
    models.RELPOS: '`vit_relpos_base_patch16_224`',
    models.SWIN: '`swin_base_patch4_window7_224`',
}
PEERS = {
    peers.OURS: 'ours',
    peers.WINDOW: 'ours, bias constant beyond 13 tokens',
    peers.LINEAR: 'ours, no bias',
    'sdpa, no bias': 'SDPA, no bias',
    'sdpa, bias as mask': 'SDPA, bias as mask',
    'flex attention, bias': 'FlexAttention, bias',
    peers.PERFORMER: 'performer-pytorch, no bias',
    'straightforward fft': 'straightforward FFT',
}


def rows(name: str) -> list[dict]:
    return read_csv(report.RESULTS / f'{name}.csv')


def times(value: float | str) -> str:
    return '' if value == '' else f'{value:.2f}×'


def seconds(value: float | str) -> str:
    return value if value == NO_FIT else significant(value)


def attention() -> list[dict]:
    found = {(r['case'], r['contender']): r['ratio'] for r in rows('attention')}
    masked = found['causal 3072, batch 1, forward', 'sdpa, causal bias mask']
    return [
        {
            'tokens': label.format(times(masked)),
            '`auto` / SDPA': times(found[case, 'auto']),
            '`fft` / SDPA': times(found[case, 'fft']),
            '`window` (bias constant beyond 13 tokens) / SDPA': times(found.get((case, 'window, radius 13'), '')),
        }
        for case, label in ATTENTION.items()
    ]


def models_beside_peers(names: tuple[str, ...], training: bool) -> list[dict]:
    """Speed as a multiple of DeiT's, the median of ratios within rounds; DeiT's own seconds beside it."""
    found = {(r['pixels'], r['mode'], r['model']): r for r in rows('models')}
    table = []
    for pixels, mode in sorted({key[:2] for key in found}, key=lambda key: (key[1], key[0])):
        if mode == 'training' and not training:
            continue
        deit = found.get((pixels, mode, models.DEIT))
        if deit is None:
            continue  # beside no peer
        line = f'{pixels} px' + (', training step' if mode == 'training' else '')
        row = {'image side': line + (f', batch {deit["batch"]}' if deit['batch'] > 1 else '')}
        for name in names:
            row[MODELS[name]] = speed_and_memory(found.get((pixels, mode, name)))
        own = f'{significant(deit["seconds"] / deit["batch"])} s per image, {deit["peak_mb"]} MB'
        table.append({**row, '`deit_base_patch16_224`': own})
    return table


def speed_and_memory(row: dict | None) -> str:
    if row is None:
        return ''
    return NO_FIT if row['seconds'] == NO_FIT else f'{times(row["speed_over_deit"])}, {row["peak_mb"]} MB'


def models_short() -> list[dict]:
    return models_beside_peers(measured((models.OURS, models.EXTENDED, models.CELLS, models.RELPOS)), training=False)


def models_all() -> list[dict]:
    names = (models.OURS, models.EXTENDED, models.CELLS, models.RELPOS, models.SWIN)
    return models_beside_peers(measured(names), training=True)


def measured(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the models that have rows."""
    known = {r['model'] for r in rows('models')}
    return tuple(name for name in names if name in known)


def length() -> list[dict]:
    found = {(r['panel'], r['n'], r['contender'], r['m']): r['seconds'] for r in rows('length')}
    forward, both = 'sequence, forward', 'sequence, forward+backward'
    columns = {
        'SDPA, no bias': (forward, SDPA, ''),
        'matrix stored': (forward, STORED, ''),
        '`auto`, m=16': (forward, 'auto', 16),
        'm=32': (forward, 'auto', 32),
        'm=64': (forward, 'auto', 64),
        'SDPA, forward+backward': (both, SDPA, ''),
        '`auto`, forward+backward': (both, 'auto', 32),
    }
    return [
        {'tokens': n, **{label: seconds(found[panel, n, name, m]) for label, (panel, name, m) in columns.items()}}
        for n in (1024, 4096, 8192, 16384, 40960)
    ]


def peers_by_grid(mode: str) -> list[dict]:
    chosen = [r | {'grid': r['grid'].replace('x', '×')} for r in rows('peers') if r['mode'] == mode]
    lines = by_size([r for r in chosen if r['seconds'] != peers.NO_BACKWARD], lambda r: PEERS[r['contender']], 'grid')
    return [{mode: line.pop('grid'), **line} for line in lines]


def window() -> list[dict]:
    return [
        {
            'grid': f'{r["side"]}×{r["side"]}',
            'µs per token': f'{r["us_per_token"]:.1f}',
            'peak memory above inputs': f'{r["peak_mb"]:.0f} MB',
            'SDPA / `window`': times(r['speedup']) or 'SDPA not run',
        }
        for r in rows('window')
    ]


def cells() -> list[dict]:
    return [
        {
            'grid': f'{r["side"]}×{r["side"]}' + (', forward+backward' if r['mode'] != 'forward' else ''),
            'µs per token': f'{r["us_per_token"]:.1f}',
            'peak memory above inputs': f'{r["peak_mb"]:.0f} MB',
            'SDPA / `cells`': times(r['speedup']) or 'SDPA not run',
            '`cells` / `linear` without bias': times(r['over_no_bias']),
        }
        for r in rows('cells')
    ] or [{'grid': 'all', 'SDPA / `cells`': 'not run'}]


def pixel_training() -> list[dict]:
    found = {(r['what'], r['model']): r for r in rows('pixel_training')}
    table = []
    for name, said in (('nprf_pixel_imagenet32', ''), ('softmax_pixel_imagenet32', ', the bias as its mask')):
        memory = found['peak MB of a training step', name]['value']
        row = {'model': f'`{name}`{said}', 'seconds': f'{found["training step", name]["seconds"]:.1f}'}
        table.append({**row, 'peak memory beyond the model': f'{memory:.0f} MB'})
    whats = ('training time / softmax', 'peak memory / softmax')
    shares = (f'{found[what, "nprf_pixel_imagenet32"]["value"]:.2f}' for what in whats)
    return [*table, dict(zip(table[0], ('ratio (of the time: median within rounds)', *shares)))]


def budget() -> list[dict]:
    return [
        {
            'config': f'`{r["config"].removeprefix("configs/")}`',
            'GFLOP per image, forward': r['gflop_per_image'],
            'of it the attention op': f'{r["of_it_attention_op"]:.2f}'.replace('0.00', 'in half precision'),
            **{gpu: f'{r[f"{gpu}_days"]:.1f}' for gpu in ('V100', 'A100', 'H100')},
        }
        for r in rows('budget')
    ]


TABLES = {
    'attention': attention,
    'models_short': models_short,
    'models': models_all,
    'length': length,
    'peers_forward': lambda: peers_by_grid('forward'),
    'peers_training': lambda: peers_by_grid('forward+backward'),
    'window': window,
    'cells': cells,
    'pixel_training': pixel_training,
    'budget': budget,
}
