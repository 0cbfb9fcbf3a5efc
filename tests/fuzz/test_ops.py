"""Every backend of `kernel_attention` on random calls against the float64 oracle of `oracle.py`.

    python -m pytest tests/fuzz/test_ops.py --budget 5000

What is promised: each output element within 1e-3 of Σ_j a_ij|v_j| in float32 (1e-4 where no FFT and no difference of
sums is involved) and 1e-8 in float64; each gradient within 2e-3 (1e-6) of the sum of its terms' absolute values, in
norm per head and batch item. Rows whose visible keys are all zero give zero and have no gradient.
"""

import numpy as np
import pytest
import torch
from hypothesis import event, given, note
from hypothesis import strategies as st

from nprf_vit.ops import DecodeState, kernel_attention, prefix_attention
from nprf_vit.ops.backends.flex import flex_attention

from . import oracle
from .budget import fuzz
from .cases import Case, calls, calls_with_cells, calls_with_key_mask, cross_calls, prefixed_calls

BACKENDS = ['auto', 'direct', 'fft', 'linear', 'window', 'step', 'flex']
FORWARD = {torch.float32: 1e-3, torch.float64: 1e-8}
GRADIENT = {torch.float32: 2e-3, torch.float64: 1e-6}
PLAIN_SUM = 1e-4
# Terms smaller than this part of the largest value may vanish, and gradients beyond this many times the cotangent
# overflow: both are the dtype's own range, with room for the features' scales.
RANGE = {torch.float32: 1e-30, torch.float64: 1e-290}
# Small features leave less of that range: docs/backends.md, "Dtypes"
SMALL_ROWS = 1e-8
STEPS = 70


def serves(backend: str, case: Case) -> bool:
    n, by_offset = case.v.shape[2], case.cells is None
    return {
        'fft': case.bias is not None and by_offset,
        'linear': case.bias is None,
        'window': case.far is not None,
        'step': case.causal and n <= STEPS,
        'flex': n <= 300 and by_offset,
        'cells': case.cells is not None,
    }.get(backend, True)


def run(backend: str, case: Case, **tensors):
    arguments = case.tensors() | tensors
    options = {'grid_size': case.grid_size, 'cells': case.cells, 'backend': backend}
    if case.prefix is not None:
        prefix = case.prefix._replace(**{name: arguments.pop(name) for name in case.prefix._fields})
        return prefix_attention(**arguments, prefix=prefix, **options)
    if backend == 'state':
        state = DecodeState.of_keys(arguments['phi_k'], arguments['v'], case.key_mask)
        return torch.stack([state.query(q) for q in arguments['phi_q'].unbind(2)], dim=2)
    if backend == 'flex':
        return _flex(arguments | {name: case.visible(name) for name in ('phi_k', 'v')}, case)
    return kernel_attention(**arguments, causal=case.causal, key_mask=case.key_mask, **options)


def _flex(arguments, case):
    """FlexAttention without compilation: its public door wants a GPU."""
    height, width = case.grid_size or (1, case.phi_q.shape[2])
    bias, far = arguments.get('bias'), arguments.get('far')
    if far is not None:
        table = oracle.Table.build(tuple(bias.shape[1:]), case.v.shape[2], case.grid_size)
        dense = table.gather(bias.double().numpy(), far.double().numpy())  # K, N, N
        bias = _whole_table(dense, height, width).to(bias.dtype)
    elif bias is not None:
        bias = bias.reshape(bias.shape[0], 2 * height - 1, 2 * width - 1)
    names = ('phi_q', 'phi_k', 'v')
    return flex_attention(*(arguments[x] for x in names), bias, (height, width), case.causal, compiled=False)


def _whole_table(dense, height, width):
    table = np.empty((dense.shape[0], 2 * height - 1, 2 * width - 1))
    for dy in range(1 - height, height):
        for dx in range(1 - width, width):
            i = max(0, -dy) * width + max(0, -dx)
            table[:, dy + height - 1, dx + width - 1] = dense[:, i, i + dy * width + dx]
    return torch.from_numpy(table)


def exact(case: Case) -> oracle.Result:
    arrays = {name: x.detach().double().numpy() for name, x in case.tensors().items()}
    arrays = {'bias': None, 'far': None} | arrays
    options = {'grid_size': case.grid_size, 'causal': case.causal, 'cells': case.cells}
    options['key_mask'] = None if case.key_mask is None else case.key_mask.numpy()
    return oracle.attention(**arrays, **options, g=case.cotangent.double().numpy())


def tolerance(backend: str, case: Case) -> float:
    dtype = case.v.dtype
    if (
        backend == 'flex' and not case.visible('phi_k').any(-1).all()
    ):  # a zero key may hold the largest bias, from which all count
        return FORWARD[dtype] + _spread(case) * torch.finfo(dtype).eps
    return PLAIN_SUM if backend in ('direct', 'linear', 'step') and dtype == torch.float32 else FORWARD[dtype]


def check_output(z, case, expected, backend, rows=None):
    """Every element of the rows (B, K, N) given, or of all."""
    z = z.detach().double().numpy()
    largest = abs(case.visible('v').double().numpy()).max((-2, -1), keepdims=True)
    allowed = tolerance(backend, case) * expected.scales['z'] + _range(case) * largest
    error = abs(z - expected.values['z'])
    rows = np.ones(z.shape[:3], dtype=bool) if rows is None else rows
    good = (error <= allowed).all(-1) | ~rows
    with np.errstate(divide='ignore', invalid='ignore'):
        worst = np.nanmax(np.where(rows[..., None], error / expected.scales['z'], 0), initial=0)
    where = np.argwhere(~good)[:3].tolist()
    assert good.all(), f'{backend}: output off by {worst:.1e} of its terms, or not finite, at rows {where}: {case}'


def _range(case):
    """(B, K, N, 1) part of the largest value that may vanish in a row."""
    q, k = (x.detach().double().numpy() for x in (case.phi_q, case.visible('phi_k')))
    size = q.max(-1, keepdims=True) * k.max((-2, -1), keepdims=True)
    return np.minimum(RANGE[case.v.dtype] / size.clip(1e-300, 1), SMALL_ROWS)


def check_gradients(grads, case, expected, backend, heads=None):
    """Each gradient in norm per batch item and head; `heads` (B, K) says which to look at."""
    dtype = case.v.dtype
    heads = np.ones(case.v.shape[:2], dtype=bool) if heads is None else heads
    for name, g in grads.items():
        g, value, scale = g.double().numpy(), expected.values[name], expected.scales[name]
        seen = scale < 1 / RANGE[dtype]
        # what a zero key would count for is bounded there, and on a grid of them alone nothing
        if name == 'phi_k' and (_spread(case) > 80 or case.prefix is not None):
            zero = ~case.visible('phi_k').numpy().any(-1, keepdims=True)
            assert np.isfinite(g[np.broadcast_to(zero & heads[..., None, None], g.shape)]).all(), case
            seen = seen & ~zero
        weight = 1.0
        vanished = 0.0
        if name == 'phi_q':  # a factor per query cancels in the output and divides the gradient
            weight = abs(case.phi_q.detach().double().numpy()).max(-1, keepdims=True)
            # what vanished from an output is missing here too
            sizes = (abs(x.double().numpy()).sum((-2, -1)) for x in (case.visible('v'), case.cotangent))
            vanished = _range(case).max((-2, -1)) * np.prod(list(sizes), axis=0)
        error, scale = (np.where(seen, x * weight, 0) for x in (abs(g - value), scale))
        axes = (-2, -1) if name in ('phi_q', 'phi_k', 'v') else tuple(range(1, g.ndim))
        wanted = heads if name in ('phi_q', 'phi_k', 'v') else heads.all(0)
        error, scale = (np.sqrt(np.square(x).sum(axes)) for x in (error, scale))
        if name == 'far':  # an entry of the table like others, even where no pair of tokens needs it
            scale = scale + np.sqrt(np.square(expected.scales['bias']).sum(tuple(range(1, case.bias.dim()))))
        good = (error <= GRADIENT[dtype] * scale + RANGE[dtype] + vanished) | ~wanted
        with np.errstate(divide='ignore', invalid='ignore'):
            worst = np.nanmax(np.where(wanted, error / scale, 0), initial=0)
        assert good.all(), f'{backend}: gradient of {name} off by {worst:.1e} of its terms, or not finite: {case}'


def _spread(case: Case) -> float:
    """Largest difference of two biases."""
    tables = [x.detach() for x in (case.bias, case.far, *(case.prefix or ())) if x is not None]
    return 0.0 if not tables else (max(x.max() for x in tables) - min(x.min() for x in tables)).item()


def gradients(backend, case):
    leaves = {name: x.detach().requires_grad_() for name, x in case.tensors().items()}
    z = run(backend, case, **leaves)
    grads = torch.autograd.grad(z, list(leaves.values()), case.cotangent, allow_unused=True)
    return {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), grads)}


def check_all(backend, case):
    note(str(case))
    expected = exact(case)
    check_output(run(backend, case), case, expected, backend)
    if backend not in ('step', 'flex', 'state'):
        check_gradients(gradients(backend, case), case, expected, backend)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
@given(case=calls())
@fuzz(25)
def test_output_and_gradients(backend, case):
    if not serves(backend, case):
        event(f'{backend} does not serve this')
        return
    check_all(backend, case)


@pytest.mark.parametrize('backend', ['auto', 'direct', 'cells'])
@given(case=calls_with_cells())
@fuzz(25)
def test_output_and_gradients_with_cells(backend, case):
    check_all(backend, case)


@pytest.mark.parametrize('backend', [*BACKENDS, 'cells'])
@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
@given(case=calls_with_key_mask())
@fuzz(25)
def test_masked_keys(backend, case):
    """They reach nothing, whatever they hold, and their own gradients are zero."""
    if serves(backend, case):
        check_all(backend, case)


@pytest.mark.parametrize('backend', ['auto', 'direct', 'linear', 'flex', 'state'])
@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
@given(case=cross_calls())
@fuzz(25)
def test_cross_attention(backend, case):
    if serves(backend, case):
        check_all(backend, case)


@pytest.mark.parametrize('backend', ['auto', 'direct', 'fft', 'linear', 'window', 'cells'])
@given(case=prefixed_calls())
@fuzz(25)
def test_prefix_tokens(backend, case):
    if serves(backend, case):
        check_all(backend, case)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
@given(
    case=calls(),
    poison=st.sampled_from([float('nan'), float('inf')]),
    name=st.sampled_from(['phi_q', 'phi_k', 'v']),
    token=st.integers(0, 2000),
)
@fuzz(15)
def test_a_nan_stays_in_its_head(backend, case, poison, name, token):
    """A token that is not a number spoils its own batch item and head, and no other."""
    if not serves(backend, case):
        return
    note(f'{name} token {token % case.v.shape[2]} {poison} {case}')
    expected = exact(case)
    getattr(case, name)[0, 0, token % case.v.shape[2]] = poison
    others = np.ones(case.v.shape[:2], dtype=bool)
    others[0, 0] = False
    rows = np.repeat(others[..., None], case.v.shape[2], -1)
    check_output(run(backend, case), case, expected, backend, rows)
    if backend not in ('step', 'flex'):
        check_gradients(gradients(backend, case), case, expected, backend, others)


def test_a_wrong_gradient_and_a_wrong_output_are_noticed():
    g = torch.Generator().manual_seed(0)
    phi_q, phi_k = torch.rand(2, 2, 2, 9, 4, generator=g) + 0.1
    v, cotangent = torch.randn(2, 2, 2, 9, 3, generator=g)
    case = Case({}, phi_q, phi_k, v, torch.randn(2, 17, generator=g), None, cotangent, None, False)
    expected = exact(case)
    z, grads = run('direct', case), gradients('direct', case)
    check_output(z, case, expected, 'direct')
    check_gradients(grads, case, expected, 'direct')
    wrong = z.clone()
    wrong[1, 1, 8, 2] *= 1.01
    with pytest.raises(AssertionError, match='output off'):
        check_output(wrong, case, expected, 'direct')
    for name, x in grads.items():
        with pytest.raises(AssertionError, match=f'gradient of {name}'):
            check_gradients({name: x.flip(-1)}, case, expected, 'direct')
        with pytest.raises(AssertionError, match=f'gradient of {name}'):
            check_gradients({name: x * float('nan')}, case, expected, 'direct')
