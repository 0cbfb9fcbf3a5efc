"""Masked keys: every backend against an oracle that leaves them out, forward and all gradients."""

# B batch, N tokens, K heads, M features, D head dim
from dataclasses import replace

import pytest
import torch

from nprf_vit.ops import DecodeState, draw_projection, feature_map, kernel_attention, reference
from nprf_vit.ops.backends import batched
from nprf_vit.ops.backends.flex import flex_attention
from nprf_vit.ops.key_mask import hide_keys

from .compare import assert_gradients, gradients, make_case, tolerance

GRID, LENGTH = (5, 7), 35


def masks(n, batch=3):
    """Padding behind, holes, and an item that sees one key; the first key of the second item is hidden."""
    mask = torch.ones(batch, n, dtype=torch.bool)
    mask[0, n - n // 3 :] = False
    mask[1] = torch.rand(n, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[1, 0], mask[1, 1] = False, True
    mask[2] = torch.arange(n) == n // 2
    return mask


def case_of(kind, dtype=torch.float64, std=0.5):
    shape = {
        'grid': {'grid_size': GRID},
        'window': {'grid_size': GRID},
        'cells': {'grid_size': GRID, 'cells': (2, 3)},
        'sequence': {'n': LENGTH},
        'causal': {'n': LENGTH, 'causal': True},
        'none': {'n': LENGTH, 'std': None},
        'causal_none': {'n': LENGTH, 'std': None, 'causal': True},
    }[kind]
    case = make_case(**{'std': std, 'batch': 3, 'dtype': dtype} | shape)
    if kind == 'window':
        return replace(case, bias=case.bias[:, 2:-2, 4:-4].contiguous(), far=torch.tensor([0.3, -0.2], dtype=dtype))
    return case


SERVED = {
    'direct': ('grid', 'window', 'cells', 'sequence', 'causal', 'none', 'causal_none'),
    'fft': ('grid', 'window', 'sequence', 'causal'),
    'linear': ('none', 'causal_none'),
    'window': ('window',),
    'cells': ('cells',),
    'auto': ('grid', 'window', 'cells', 'causal', 'none'),
}
PAIRS = [(backend, kind) for backend, kinds in SERVED.items() for kind in kinds]


def poisoned(case, mask):
    """NaN and infinity in the masked keys and values."""
    hidden = ~mask[:, None, :, None]
    return replace(case, phi_k=case.phi_k.masked_fill(hidden, torch.nan), v=case.v.masked_fill(hidden, torch.inf))


def check(case, mask, run, forward_tol, gradient_tol):
    """`run(case)` on poisoned inputs against the oracle: output relative to Σ_j a_ij|v_j|, and every gradient."""
    exact = case.map(lambda t: t.detach().double())
    z = run(poisoned(case, mask)).double()
    arguments = exact.arguments()
    del arguments['v']
    weights = reference.attention_weights(**arguments, key_mask=mask)
    expected, scale = weights @ exact.v, weights.abs() @ exact.v.abs()
    torch.testing.assert_close(expected, reference.attention(**exact.arguments(), key_mask=mask))
    assert z.isfinite().all()
    assert ((z - expected).abs() <= forward_tol * scale).all(), f'{((z - expected).abs() / scale).nan_to_num().max()}'

    names = list(case.tensors())
    cotangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(1), dtype=case.v.dtype)
    actual = gradients(run, poisoned(case, mask), cotangent, names)
    oracle = gradients(lambda c: reference.attention(**c.arguments(), key_mask=mask), exact, cotangent.double(), names)
    assert_gradients(actual, oracle, gradient_tol)
    hidden = ~mask[:, None, :, None].expand_as(actual['v'])
    assert (actual['v'][hidden] == 0).all() and (actual['phi_k'].transpose(1, 2)[~mask] == 0).all()


def op(backend, mask, **options):
    return lambda case: kernel_attention(**case.arguments(), backend=backend, key_mask=mask, **options)


@pytest.mark.parametrize(('backend', 'kind'), PAIRS)
def test_against_the_oracle(backend, kind):
    case, mask = case_of(kind), masks(LENGTH)
    check(case, mask, op(backend, mask), 1e-8, 1e-6)


@pytest.mark.parametrize(('backend', 'kind'), PAIRS)
@pytest.mark.parametrize('std', [0.5, 6.0])
def test_in_float32(backend, kind, std):
    case, mask = case_of(kind, torch.float32, std), masks(LENGTH)
    check(case, mask, op(backend, mask), tolerance(backend, torch.float32), 2e-3)


@pytest.mark.parametrize(('backend', 'kind'), [pair for pair in PAIRS if 'none' not in pair[1]])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_a_peak_above_a_masked_key(backend, kind, dtype):
    """One key is hidden from all, and the bias of one query to it is 100: nothing of the others is lost."""
    case = case_of(kind, dtype)
    mask = torch.ones(3, LENGTH, dtype=torch.bool)
    mask[:, LENGTH // 2] = False
    table = case.bias.clone()
    table.view(2, -1)[:, table[0].numel() // 2] += 100.0  # offset zero: the masked key's own query sees it there
    table.view(2, -1)[:, table[0].numel() // 2 - 1] += 100.0 if kind == 'causal' else 0.0
    case = replace(case, bias=table)
    tol = {torch.float32: (1e-3, 2e-3), torch.float64: (1e-8, 1e-6)}[dtype]
    check(case, mask, op(backend, mask), *tol)


@pytest.mark.parametrize('kind', ['grid', 'causal', 'none'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_values(kind, dtype):
    case, mask = case_of(kind, torch.float32), masks(LENGTH)
    case.v = case.v.to(dtype).float()
    half = replace(poisoned(case, mask), v=poisoned(case, mask).v.to(dtype))
    z = op('auto', mask)(half)
    assert z.dtype == dtype
    assert torch.equal(z, op('auto', mask)(case).to(dtype))


@pytest.mark.parametrize('kind', ['grid', 'window', 'cells', 'causal', 'none', 'causal_none'])
def test_signed_features(kind):
    case, mask = case_of(kind), masks(LENGTH)
    case.phi_q[..., 0] *= -0.2
    for backend in [name for name, kinds in SERVED.items() if kind in kinds]:
        check(case, mask, op(backend, mask, positive=False), 1e-7, 1e-6)


@pytest.mark.parametrize('positive', [True, False])
@pytest.mark.parametrize(('backend', 'kind'), PAIRS)
def test_rows_without_keys_are_zero(backend, kind, positive):
    case, mask = case_of(kind, torch.float32), masks(LENGTH)
    mask[0] = False
    z = op(backend, mask, positive=positive)(poisoned(case, mask))
    assert (z[0] == 0).all() and z.isfinite().all()
    if case.causal:
        assert (z[1, :, 0] == 0).all() and (z[1, :, 1:] != 0).all()
    names = list(case.tensors())
    grads = gradients(op(backend, mask, positive=positive), poisoned(case, mask), torch.ones_like(case.v), names)
    assert all(g.isfinite().all() for g in grads.values())
    assert all((grads[name][0] == 0).all() for name in ('phi_q', 'phi_k', 'v'))


@pytest.mark.parametrize('kind', ['causal', 'causal_none'])
@pytest.mark.parametrize('positive', [True, False])
def test_decoding(kind, positive):
    case, mask = case_of(kind), masks(LENGTH)
    mask[0] = torch.arange(LENGTH) >= 4  # padded on the left
    expected = reference.attention(**case.arguments(), key_mask=mask)
    z = op('step', mask, positive=positive)(poisoned(case, mask))
    torch.testing.assert_close(z, expected, rtol=1e-9, atol=1e-12)
    state, bad = DecodeState(case.bias, positive=positive), poisoned(case, mask)
    steps = [state.step(*(x[:, :, t] for x in (bad.phi_q, bad.phi_k, bad.v)), mask[:, t]) for t in range(LENGTH)]
    torch.testing.assert_close(torch.stack(steps, 2), expected, rtol=1e-9, atol=1e-12)
    assert (steps[3][0] == 0).all()


@pytest.mark.parametrize('positive', [True, False])
def test_decoding_under_a_peak_above_a_masked_key(positive):
    """A row that sees the peak at a hidden key alone keeps the others, however far below they lie."""
    case, mask = case_of('causal', torch.float32), masks(LENGTH)
    case.phi_q[..., 0] *= 1 if positive else -0.2
    case = replace(case, bias=case.bias.index_fill(1, torch.tensor(LENGTH - 2), 750.0))
    exact = case.map(torch.Tensor.double)
    expected = reference.attention(**exact.arguments(), key_mask=mask).float()
    actual = op('step', mask, positive=positive)(poisoned(case, mask))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kind', ['grid', 'window', 'cells', 'causal', 'none', 'causal_none'])
@pytest.mark.parametrize('positive', [True, False])
def test_the_plain_path_off_the_cpu(kind, positive):
    case, mask = case_of(kind), masks(LENGTH)
    mask[2] = False
    grid = case.grid_size or (1, LENGTH)
    leaves = poisoned(case, mask)
    bias = None if case.bias is None else case.bias.reshape(2, -1, case.bias.shape[-1])
    inputs = leaves.phi_q, hide_keys(leaves.phi_k, mask), hide_keys(leaves.v, mask), bias, case.far
    z, den = batched.attend(*inputs, grid, case.causal, positive, case.cells)
    torch.testing.assert_close(z, reference.attention(**case.arguments(), key_mask=mask), rtol=1e-9, atol=1e-11)
    cotangent = torch.ones_like(z)
    grads = batched.attend_backward(*inputs, z, den, cotangent, grid, case.causal, bias is not None, case.cells)
    names = list(case.tensors())
    oracle = gradients(lambda c: reference.attention(**c.arguments(), key_mask=mask), case, cotangent, names)
    for name, g in zip(('phi_q', 'phi_k', 'v', 'bias', 'far'), grads):
        if g is None:
            continue
        g = hide_keys(g, mask) if name in ('phi_k', 'v') else g.reshape(oracle[name].shape)
        torch.testing.assert_close(g, oracle[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize('kind', ['grid', 'causal', 'none'])
@pytest.mark.parametrize('peak', [0.0, 100.0])
@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
def test_flex(kind, peak):
    """Its gradients are not run here: FlexAttention has none on the CPU."""
    case, mask = case_of(kind, torch.float32), masks(LENGTH)
    bias = None if case.bias is None else case.bias.reshape(2, -1, case.bias.shape[-1]).clone()
    if bias is not None:
        bias.view(2, -1)[:, bias[0].numel() // 2] += peak
        case.bias = bias.reshape(case.bias.shape)
    phi_k, v = hide_keys(case.phi_k, mask), hide_keys(case.v, mask)
    z = flex_attention(case.phi_q, phi_k, v, bias, case.grid_size or (1, LENGTH), case.causal, compiled=False)
    expected = reference.attention(**case.map(torch.Tensor.double).arguments(), key_mask=mask)
    sees = mask.cumsum(1) > 0 if case.causal else mask.any(1, keepdim=True).expand_as(mask)
    for got, wanted in zip(z.transpose(1, 2)[sees], expected.transpose(1, 2)[sees]):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-4)


def test_a_mask_of_ones_is_no_mask():
    case = case_of('grid', torch.float32)
    assert torch.equal(op('auto', torch.ones(3, LENGTH, dtype=torch.bool))(case), case.run())


def test_a_wrong_mask_is_noticed():
    case, mask = case_of('grid'), masks(LENGTH)
    flipped = mask.roll(1, 1)
    with pytest.raises(AssertionError):
        check(case, flipped, lambda c: kernel_attention(**case.arguments(), key_mask=mask), 1e-8, 1e-6)


@pytest.mark.parametrize('kind', ['prf', 'orf', 'sphere', 'trf', 'elu'])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('normalize', [False, True])
def test_features_do_not_see_masked_keys(kind, causal, normalize):
    """A raw key far longer than the others would set the maximum by which all are divided."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 9, 4, generator=g)
    w = draw_projection(3, 8, 4, kind)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 6:] = False
    mask[1] = False
    options = {'kind': kind, 'causal': causal, 'normalize': normalize}
    alone = feature_map(x[:1, :, :6], w, **options)
    for bad in (3e3, torch.nan, torch.inf):
        filled = x.masked_fill(~mask[:, None, :, None], bad).requires_grad_()
        phi = feature_map(filled, w, **options, key_mask=mask)
        torch.testing.assert_close(phi[:1, :, :6], alone, rtol=1e-6, atol=0)
        assert (phi.transpose(1, 2)[~mask] == 0).all()
        (grad,) = torch.autograd.grad(phi.sum(), filled)
        assert grad.isfinite().all() and (grad.transpose(1, 2)[~mask] == 0).all()


def test_zeros_in_place_of_masked_keys_would_not_do():
    """exp(0) is above every feature of long keys, which are then cut at the floor: why the mask goes into the map."""
    x = 60 * torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    w, mask = draw_projection(1, 8, 4), torch.tensor([[True, True, True, False]])
    alone = feature_map(x[:, :, :3], w)
    assert not torch.allclose(feature_map(hide_keys(x, mask), w)[:, :, :3], alone)
    torch.testing.assert_close(feature_map(x, w, key_mask=mask)[:, :, :3], alone)


@pytest.mark.parametrize(
    ('mask', 'message'),
    [
        (torch.ones(3, 34, dtype=torch.bool), r'\(3, 34\).*\(3, 35\)'),
        (torch.ones(3, 1, 1, 35, dtype=torch.bool), r'\(3, 1, 1, 35\).*\(3, 35\)'),
        (torch.ones(3, 35), 'float32.*bool'),
        (torch.ones(3, 35, dtype=torch.long), 'int64.*bool'),
        ([[True] * 35] * 3, 'list'),
        (torch.ones(3, 35, dtype=torch.bool, device='meta'), 'meta.*cpu'),
    ],
)
def test_errors(mask, message):
    case = case_of('grid')
    with pytest.raises(ValueError, match=message):
        kernel_attention(**case.arguments(), key_mask=mask)


def test_features_of_queries_have_no_mask():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="role 'query'"):
        feature_map(x, draw_projection(2, 4, 4), role='query', key_mask=torch.ones(1, 3, dtype=torch.bool))


def test_compiled():
    case, mask = case_of('grid', torch.float32), masks(LENGTH)

    @torch.compile(backend='aot_eager', fullgraph=True)
    def run(q, k, v, mask):
        return kernel_attention(q, k, v, case.bias, grid_size=GRID, key_mask=mask)

    z = run(case.phi_q, case.phi_k, case.v, mask)
    torch.testing.assert_close(z, op('auto', mask)(case))
