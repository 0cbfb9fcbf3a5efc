"""Random calls of `kernel_attention` and `prefix_attention`: hypothesis draws the structure, a seed the numbers."""

# B batch, N tokens, L keys, P prefix tokens, K heads, M features, D head dim, H×W grid (N = H·W)
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from nprf_vit.ops.bias import PrefixBias

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
    key_mask: Tensor | None = field(repr=False, default=None)
    prefix: PrefixBias | None = field(repr=False, default=None)

    def tensors(self) -> dict[str, Tensor]:
        names = ('phi_q', 'phi_k', 'v', 'bias', 'far')
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return given if self.prefix is None else given | self.prefix._asdict()

    def visible(self, name: str) -> Tensor:
        """phi_k or v (B, K, L, ·) with zeros in place of masked keys, which may hold anything."""
        x = getattr(self, name).detach()
        return x if self.key_mask is None else x.masked_fill(~self.key_mask[:, None, :, None], 0)


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
def key_masks(draw) -> dict:
    """Which keys are seen, and what those hold that are not."""
    return {
        'kind': draw(st.sampled_from(['some', 'some', 'most', 'first', 'last', 'item', 'one', 'all', 'none'])),
        'held': draw(st.sampled_from(['same', 'nan', 'inf', 'large'])),
        'layout': draw(st.sampled_from(['plain', 'tokens_first', 'sliced'])),
    }


@st.composite
def prefix_biases(draw) -> dict:
    """One to four tokens before the grid, their biases flat to ±750."""
    return {
        'count': draw(st.integers(1, 4)),
        'size': draw(st.sampled_from([0.0, 0.02, 1.0, 5.0, 20.0, 80.0, 300.0, 750.0])),
        'offset': draw(st.sampled_from([0.0, 0.0, -20.0, 20.0, 750.0])),
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


@st.composite
def calls_with_key_mask(draw) -> Case:
    """The same, or one with a bias between cells, with keys that nobody attends to."""
    shape = draw(shapes())
    between = not shape['causal'] and draw(st.booleans())
    bias = draw(biases_between_cells(shape) if between else biases())
    return build(shape, bias, draw(contents()), draw(key_masks()))


@st.composite
def cross_calls(draw) -> Case:
    """Queries of one sequence and keys of another, masked or not."""
    shape = draw(shapes().filter(lambda shape: not shape['causal'] and shape['grid'] is None))
    shape['keys'] = draw(st.integers(1, 200).filter(lambda keys: keys != shape['n']))
    return build(shape, None, draw(contents()), draw(st.one_of(st.none(), key_masks())))


@st.composite
def prefixed_calls(draw) -> Case:
    """Tokens before a grid or a sequence, with any bias there."""
    shape = draw(shapes().filter(lambda shape: not shape['causal']))
    bias = draw(st.one_of(biases(), biases_between_cells(shape)))
    return build(shape, bias, draw(contents()), prefix=draw(prefix_biases()))


def build(shape: dict, bias: dict | None, content: dict, mask: dict | None = None, prefix: dict | None = None) -> Case:
    """One call with everything that its gradient needs: also what a failing case has printed."""
    g = torch.Generator().manual_seed(shape['seed'])
    dtype, p = shape['dtype'], prefix['count'] if prefix else 0
    lead = (shape['batch'], shape['heads'], shape['n'] + p)
    of_keys = (*lead[:2], shape['keys']) if 'keys' in shape else lead
    phi_q, phi_k = (_features(g, (*x, shape['m']), content['features']) for x in (lead, of_keys))
    scale = torch.rand(*lead, 1, generator=g, dtype=torch.float64) > 0.5  # some rows, so that others stand beside them
    phi_q = torch.where(scale, phi_q * content['query_scale'], phi_q)
    phi_k = _mask(g, phi_k * content['key_scale'], content['mask'])
    v = _values(g, (*of_keys, shape['d']), content['values'])
    cotangent = _normal(g, *lead, shape['d'])
    table, far = (None, None) if bias is None else _bias(g, bias, shape)
    key_mask = None if mask is None else _key_mask(g, (of_keys[0], of_keys[2]), mask)
    if key_mask is not None and mask is not None:
        phi_k, v = (_fill(x, key_mask, mask['held']) for x in (phi_k, v))
    tensors = [_layout(x.to(dtype), content['layout']) for x in (phi_q, phi_k, v)]
    tables = [None if x is None else x.to(dtype) for x in (table, far)]
    choices = {'shape': shape, 'bias': bias, 'content': content, 'mask': mask, 'prefix': prefix}
    cells = bias.get('cells') if bias else None
    cells = cells if cells is None or shape['grid'] else cells[0]
    options = cotangent.to(dtype), shape['grid'], shape['causal'], cells, key_mask
    return Case(choices, *tensors, *tables, *options, _prefix(g, prefix, shape) if prefix else None)


def _prefix(g, prefix, shape):
    p, heads = prefix['count'], shape['heads']
    shapes = (heads, p), (heads, p), (heads, p, p)
    sized = (2 * torch.rand(*s, generator=g, dtype=torch.float64) - 1 for s in shapes)
    return PrefixBias(*((prefix['size'] * x + prefix['offset']).to(shape['dtype']) for x in sized))


def _key_mask(g, shape, mask):
    batch, keys = shape
    half = keys // 2 + 1
    seen = torch.rand(batch, keys, generator=g) < (0.1 if mask['kind'] == 'most' else 0.6)
    if mask['kind'] in ('first', 'last'):
        seen = (torch.arange(keys) >= half).expand(batch, keys) == (mask['kind'] == 'first')
    elif mask['kind'] == 'one':  # one key is left
        seen = torch.arange(keys) == torch.randint(keys, (batch, 1), generator=g)
    elif mask['kind'] in ('all', 'none', 'item'):
        seen = torch.full((batch, keys), mask['kind'] != 'none')
        seen[0] = mask['kind'] == 'all'
    return _layout(seen[:, :, None, None], mask['layout'])[:, :, 0, 0]


def _fill(x, key_mask, held):
    if held == 'same':
        return x
    return x.masked_fill(~key_mask[:, None, :, None], {'nan': torch.nan, 'inf': torch.inf, 'large': 1e30}[held])


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
        wide = torch.full((*x.shape[:2], 2 * x.shape[2] + 1, x.shape[3] + 3), float('nan')).to(x.dtype)
        view = wide[:, :, 1::2, 1:-2]
        return view.copy_(x)
    return x
