"""Random calls of `kernel_attention`: the structure is drawn by hypothesis, the numbers follow from a seed."""

# B batch, N tokens, K heads, M features, D head dim, H×W grid (N = H·W)
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

PEAKS = [15.0, 20.0, 30.0, 50.0, 88.0, 104.0, 200.0, 400.0, 720.0, 750.0]


@dataclass
class Case:
    """One call; a failing one prints as the choices that made it."""

    choices: dict
    phi_q: Tensor = field(repr=False)
    phi_k: Tensor = field(repr=False)
    v: Tensor = field(repr=False)
    bias: Tensor | None = field(repr=False)
    far: Tensor | None = field(repr=False)
    cotangent: Tensor = field(repr=False)
    grid_size: tuple[int, int] | None = field(repr=False)
    causal: bool = field(repr=False)
    cells: tuple[int, int] | int | None = field(repr=False, default=None)

    def tensors(self) -> dict[str, Tensor]:
        names = ('phi_q', 'phi_k', 'v', 'bias', 'far')
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@st.composite
def shapes(draw) -> dict:
    """Sequences and grids, head dims to 256; the product of all sizes stays small."""
    kind = draw(st.sampled_from(['sequence', 'causal', 'grid']))
    if kind == 'grid':
        height, width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        n, grid = height * width, (height, width)
    else:
        n, grid = draw(st.one_of(st.integers(1, 70), st.sampled_from([128, 129, 257, 512, 513, 600, 1030]))), None
    small = n > 150
    return {
        'n': n,
        'grid': grid,
        'causal': kind == 'causal',
        'batch': draw(st.integers(1, 2 if small else 3)),
        'heads': draw(st.integers(1, 2 if small else 4)),
        'm': draw(st.sampled_from([1, 4, 8] if small else [1, 3, 8, 32, 64])),
        'd': draw(st.sampled_from([1, 4, 8] if small else [1, 3, 8, 64, 256])),
        'dtype': draw(st.sampled_from([torch.float32, torch.float64])),
        'seed': draw(st.integers(0, 2**32)),
    }


@st.composite
def biases(draw) -> dict | None:
    """A bias from flat to ±750, its heads alike or far apart, with or without a constant beyond a window."""
    form = draw(st.sampled_from(['none', 'flat', 'normal', 'uniform', 'peak', 'pit', 'slope', 'two', 'centre']))
    if form == 'none':
        return None
    size = {
        'flat': st.sampled_from([0.0, 1.0, 80.0, -750.0, 750.0, 1e5]),
        'normal': st.sampled_from([0.02, 0.5, 2.0, 5.0, 20.0, 200.0]),
        'slope': st.sampled_from([0.01, 0.3, 3.0, 30.0]),
    }.get(form, st.sampled_from(PEAKS))
    return {
        'form': form,
        'size': draw(size),
        'apart': draw(st.sampled_from([0.0, 0.0, 10.0, 30.0, 100.0, 750.0])),
        'window': draw(st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 9)))),
        'far': draw(st.sampled_from([0.0, 0.0, -1.0, 5.0, -20.0, 20.0, -100.0, 100.0, 750.0])),
    }


@st.composite
def biases_between_cells(draw, shape: dict) -> dict:
    """A bias between one cell and one per token."""
    sizes = shape['grid'] or (shape['n'],)
    bias = draw(biases().filter(lambda bias: bias is not None))
    return bias | {'window': None, 'cells': tuple(draw(st.integers(1, size)) for size in sizes)}


@st.composite
def contents(draw) -> dict:
    """Features, values, masked keys and memory layouts."""
    return {
        'features': draw(st.sampled_from(['even', 'even', 'steep', 'sparse'])),
        'query_scale': draw(st.sampled_from([1.0, 1.0, 1e-20, 1e-35, 1e8])),
        'key_scale': draw(st.sampled_from([1.0, 1.0, 1e-20, 1e8])),
        'values': draw(st.sampled_from(['normal', 'normal', 'one', 'small', 'large', 'zero'])),
        'mask': draw(st.sampled_from([None, None, 'some', 'most', 'first', 'last', 'item'])),
        'layout': draw(st.sampled_from(['plain', 'tokens_first', 'sliced', 'features_first'])),
    }


@st.composite
def calls(draw) -> Case:
    """Choices of one call, and the call."""
    return build(draw(shapes()), draw(biases()), draw(contents()))


@st.composite
def calls_with_cells(draw) -> Case:
    """The same with a bias between cells."""
    shape = draw(shapes().filter(lambda shape: not shape['causal']))
    return build(shape, draw(biases_between_cells(shape)), draw(contents()))


def build(shape: dict, bias: dict | None, content: dict) -> Case:
    """One call of `kernel_attention` with everything that its gradient needs: also what a failing case has printed."""
    g = torch.Generator().manual_seed(shape['seed'])
    dtype, lead = shape['dtype'], (shape['batch'], shape['heads'], shape['n'])
    phi_q, phi_k = (_features(g, (*lead, shape['m']), content['features']) for _ in range(2))
    scale = torch.rand(*lead, 1, generator=g, dtype=torch.float64) > 0.5  # some rows, so that others stand beside them
    phi_q = torch.where(scale, phi_q * content['query_scale'], phi_q)
    phi_k = _mask(g, phi_k * content['key_scale'], content['mask'])
    v = _values(g, (*lead, shape['d']), content['values'])
    cotangent = _normal(g, *lead, shape['d'])
    table, far = (None, None) if bias is None else _bias(g, bias, shape)
    tensors = [_layout(x.to(dtype), content['layout']) for x in (phi_q, phi_k, v)]
    tables = [None if x is None else x.to(dtype) for x in (table, far)]
    choices = {'shape': shape, 'bias': bias, 'content': content}
    cells = bias.get('cells') if bias else None
    cells = cells if cells is None or shape['grid'] else cells[0]
    return Case(choices, *tensors, *tables, cotangent.to(dtype), shape['grid'], shape['causal'], cells)


def _normal(g, *shape):
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def _features(g, shape, kind):
    if kind == 'steep':
        return (3 * _normal(g, *shape)).exp()
    x = torch.rand(*shape, generator=g, dtype=torch.float64) + 0.1
    if kind == 'sparse':  # one feature stands out per token, and not the same for all
        peak = torch.randint(shape[-1], (*shape[:-1], 1), generator=g)
        x = x.scatter(-1, peak, 1e3)
    return x


def _mask(g, phi_k, kind):
    """Keys of zero features, which nobody attends to."""
    if kind is None:
        return phi_k
    keep = torch.rand(phi_k.shape[0], 1, phi_k.shape[2], 1, generator=g) < (0.1 if kind == 'most' else 0.6)
    half = phi_k.shape[2] // 2 + 1
    if kind == 'first':
        keep = torch.arange(phi_k.shape[2])[None, None, :, None] >= half
    elif kind == 'last':
        keep = torch.arange(phi_k.shape[2])[None, None, :, None] < half
    elif kind == 'item':  # all keys of one batch item
        keep = torch.ones(phi_k.shape[0], 1, phi_k.shape[2], 1, dtype=torch.bool)
        keep[0] = False
    return phi_k * keep


def _values(g, shape, kind):
    x = _normal(g, *shape)
    if kind == 'one':
        token = torch.randint(shape[2], (1,), generator=g).item()
        return torch.zeros_like(x).index_copy_(2, torch.tensor([token]), x[:, :, token : token + 1])
    return x * {'normal': 1.0, 'small': 1e-8, 'large': 1e8, 'zero': 0.0}[kind]


def _bias(g, bias, shape):
    sizes = [2 * s - 1 for s in shape['grid']] if shape['grid'] else [2 * shape['n'] - 1]
    if bias.get('cells') is not None:
        sizes = [2 * count - 1 for count in bias['cells']]
    if bias['window'] is not None:
        sizes = [2 * r + 1 for r in bias['window'][: len(sizes)]]
    table, size = torch.zeros(shape['heads'], *sizes, dtype=torch.float64), bias['size']
    centre = torch.stack(torch.meshgrid(*(torch.arange(s) - s // 2 for s in sizes), indexing='ij'))
    entry = torch.randint(table[0].numel(), (shape['heads'], 1), generator=g)
    noise = 0.1 * _normal(g, *table.shape)
    if bias['form'] == 'flat':
        table = table + size
    elif bias['form'] == 'normal':
        table = size * _normal(g, *table.shape)
    elif bias['form'] == 'uniform':
        table = size * (2 * torch.rand(*table.shape, generator=g, dtype=torch.float64) - 1)
    elif bias['form'] in ('peak', 'pit'):
        value = size if bias['form'] == 'peak' else -size
        table = noise.flatten(1).scatter(1, entry, value).view(table.shape)
    elif bias['form'] == 'slope':
        table = noise - size * centre.abs().sum(0)
    elif bias['form'] == 'two':
        table = size * (torch.rand(*table.shape, generator=g) < 0.5)
    elif bias['form'] == 'centre':
        table = noise + size * (centre.abs().sum(0) == 0)
    apart = bias['apart'] * torch.arange(shape['heads'])
    table = table + apart.view(-1, *[1] * len(sizes))
    far = None if bias['window'] is None else bias['far'] + apart + 0.1 * _normal(g, shape['heads'])
    return table, far


def _layout(x, kind):
    if kind == 'tokens_first':  # as a projection of (B, N, C) leaves it
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == 'features_first':
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if kind == 'sliced':
        wide = torch.full((*x.shape[:2], 2 * x.shape[2] + 1, x.shape[3] + 3), float('nan'), dtype=x.dtype)
        view = wide[:, :, 1::2, 1:-2]
        return view.copy_(x)
    return x
