"""NaN and infinite tokens, sums that overflow, and rows that see no key at all."""

import dataclasses

import pytest
import torch

from nprf_vit.ops import draw_projection, feature_map, reference

from .compare import Case, assert_gradients, assert_output, gradients, make_case, tolerance

CAUSAL = ['direct', 'fft', 'linear', 'window', 'step', 'auto']


def causal_case(backend, n, batch=2, std=0.5) -> Case:
    case = make_case(n, causal=True, batch=batch, m=4, std=None if backend == 'linear' else std, dtype=torch.float32)
    if backend == 'window':
        case = dataclasses.replace(case, bias=case.bias[:, n - 3 : n + 2].contiguous(), far=torch.zeros(2))
    return case


@pytest.mark.parametrize('bad', [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize('which', ['phi_q', 'phi_k', 'v'])
@pytest.mark.parametrize('std', [0.5, 40.0], ids=['narrow', 'wide'])
@pytest.mark.parametrize(
    ('backend', 'n'), [*((b, n) for b in CAUSAL for n in (5, 37)), ('direct', 600), ('fft', 1100), ('linear', 300)]
)
def test_a_later_token_that_is_not_finite_reaches_no_earlier_one(backend, n, std, which, bad):
    if backend == 'linear' and std > 1:
        pytest.skip('no bias')
    if backend == 'step' and which != 'v' and bad < 0:
        pytest.skip('negative features have negative denominators')
    case = causal_case(backend, n, std=std)
    before = case.run(backend)
    for t in {1, n // 2, n - 1}:
        changed = case.map(torch.clone)
        getattr(changed, which)[0, 0, t, 0] = bad
        after = changed.run(backend)
        assert torch.equal(before[:, :, :t], after[:, :, :t]), f'token {t} reached an earlier one'
        assert torch.equal(before[1], after[1]), 'one batch item reached another'
        assert torch.equal(before[0, 1], after[0, 1]), 'one head reached another'
        assert not after[0, 0, t].isfinite().all(), f'token {t} itself must not look healthy'


@pytest.mark.parametrize('backend', [b for b in CAUSAL if b != 'step'])
def test_every_output_is_as_finite_as_what_it_sees(backend):
    """An infinite value is seen in its own column; a NaN key after it by later tokens only."""
    case = causal_case(backend, 40)
    before = case.run(backend)
    changed = case.map(torch.clone)
    changed.v[0, 0, 10, 1], changed.phi_k[0, 0, 20, 2] = torch.inf, torch.nan
    after = changed.run(backend)
    assert torch.equal(before[:, :, :10], after[:, :, :10])
    assert after[0, 0, 10:20, 1].eq(torch.inf).all()
    assert after[0, 0, 20:].isnan().all()
    torch.testing.assert_close(after[0, 0, 10:20, ::2], before[0, 0, 10:20, ::2], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('backend', [b for b in CAUSAL if b != 'step'])
@pytest.mark.parametrize('which', ['phi_q', 'phi_k', 'v'])
def test_gradients_of_earlier_outputs_stay_finite(backend, which):
    case = causal_case(backend, 40)
    cotangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(1))
    cotangent[0, 0, 25:] = 0
    names = list(case.tensors())
    before = gradients(lambda c: c.run(backend), case, cotangent, names)
    changed = case.map(torch.clone)
    getattr(changed, which)[0, 0, 25, 0] = torch.nan
    after = gradients(lambda c: c.run(backend), changed, cotangent, names)
    for name, g in after.items():
        torch.testing.assert_close(g, before[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f'{name}: {m}')
    cotangent[0, 0, 25] = 1
    assert not gradients(lambda c: c.run(backend), changed, cotangent, ['phi_q'])['phi_q'].isfinite().all()


# Rows without any weight


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
@pytest.mark.parametrize('std', [0.5, 40.0], ids=['narrow', 'wide'])
@pytest.mark.parametrize('backend', [b for b in CAUSAL if b != 'step'])
def test_rows_that_see_only_zero_keys_are_zero_and_so_are_their_gradients(backend, std, dtype):
    if backend == 'linear' and std > 1:
        pytest.skip('no bias')
    case = causal_case(backend, 40, std=std).map(lambda x: x.to(dtype))
    case.phi_k[0, :, :7] = 0
    cotangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert case.run(backend)[0, :, :7].eq(0).all()
    names = list(case.tensors())
    everywhere = gradients(lambda c: c.run(backend), case, cotangent, names)
    cotangent[0, :, :7] = 0
    elsewhere = gradients(lambda c: c.run(backend), case, cotangent, names)
    for name, g in everywhere.items():
        assert g.isfinite().all(), name
        torch.testing.assert_close(g, elsewhere[name], msg=lambda m, name=name: f'{name}: {m}')


@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear', 'window', 'auto'])
def test_all_keys_zero(backend):
    case = make_case(grid_size=(4, 5), std=None if backend == 'linear' else 0.5, dtype=torch.float32)
    if backend == 'window':
        case = dataclasses.replace(case, bias=case.bias[:, 2:5, 2:7].contiguous(), far=torch.zeros(2))
    case.phi_k.zero_()
    assert case.run(backend).eq(0).all()
    for name, g in gradients(lambda c: c.run(backend), case, torch.ones_like(case.v), list(case.tensors())).items():
        assert g.eq(0).all(), name


@pytest.mark.parametrize('backend', ['direct', 'fft', 'window'])
def test_rows_whose_visible_biases_are_all_minus_infinity(backend):
    """A causal window that leaves out the token itself: the first token sees nothing."""
    case = causal_case('window', 30)
    case = dataclasses.replace(case, far=torch.full((2,), -torch.inf))
    case.bias[:, 2] = -torch.inf
    z = case.run(backend)
    assert z[:, :, 0].eq(0).all()
    oracle = case.weights()[:, :, 1:] @ case.v.double()
    torch.testing.assert_close(z[:, :, 1:].double(), oracle, rtol=1e-5, atol=1e-6)
    for name, g in gradients(lambda c: c.run(backend), case, torch.ones_like(z), ['phi_q', 'phi_k', 'v']).items():
        assert g.isfinite().all(), name


def weights_of_seen_keys(case):
    """`reference.attention_weights` with row maxima over the keys that are not zero; (B, K, N, N)."""
    log_c = reference.dense_bias(case.bias, case.v.shape[2], None, case.far)
    scores = case.phi_q @ case.phi_k.transpose(-1, -2)
    unseen = scores == 0
    if case.causal:
        unseen = unseen | (reference.offsets(case.v.shape[2])[0] > 0)
    return (scores.masked_fill(unseen, 1).log() + log_c).masked_fill(unseen, -torch.inf).softmax(-1)


@pytest.mark.parametrize('scale', [1.0, 1e10])
@pytest.mark.parametrize('peak', [20.0, 60.0, 100.0, 720.0, 1e4])
@pytest.mark.parametrize('backend', ['direct', 'fft', 'window'])
@pytest.mark.parametrize('causal', [False, True])
def test_zero_keys_under_a_peak(backend, peak, scale, causal):
    """The largest bias belongs to a key without weight: what the row does see must not underflow beside it."""
    case = make_case(40, causal=causal, dtype=torch.float32)
    case.phi_k *= scale
    case.bias[:, 39] += peak
    if backend == 'window':
        case = dataclasses.replace(case, bias=case.bias[:, 36:43].contiguous(), far=torch.zeros(2))
    case.phi_k[0, :, 5:15], case.phi_k[1, 0, 7] = 0, 0
    cotangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(1))
    weights = weights_of_seen_keys(case.map(torch.Tensor.double))
    expected = weights @ case.v.double()
    allowed = tolerance('direct', torch.float32) * (weights @ case.v.double().abs())
    assert ((case.run(backend) - expected).abs() <= allowed).all()
    actual = gradients(lambda c: c.run(backend), case, cotangent, list(case.tensors()))
    expected = gradients(
        lambda c: weights_of_seen_keys(c) @ c.v, case.map(torch.Tensor.double), cotangent, list(case.tensors())
    )
    # beyond what float32 holds the gradient of such a key is only asked to be finite
    seen = case.phi_k.ne(0)
    assert actual['phi_k'].isfinite().all()
    actual['phi_k'], expected['phi_k'] = (g['phi_k'].where(seen, 0) for g in (actual, expected))
    assert_gradients(actual, expected, 2e-3)


@pytest.mark.parametrize('backend', ['direct', 'fft', 'window'])
def test_rows_that_see_beyond_a_window_of_zero_keys(backend):
    """All near keys are zero and lie e^100 above what the row sees: times large values, more than float32 holds."""
    case = make_case(60, dtype=torch.float32)
    case = dataclasses.replace(case, v=case.v * 1e8, bias=torch.zeros(2, 3), far=torch.full((2,), -100.0))
    case.phi_k[0, :, 20:30] = 0
    z, weights = case.run(backend), weights_of_seen_keys(case.map(torch.Tensor.double))
    assert ((z - weights @ case.v.double()).abs() <= 1e-4 * (weights @ case.v.double().abs())).all()
    for name, g in gradients(lambda c: c.run(backend), case, torch.ones_like(z), list(case.tensors())).items():
        assert g.isfinite().all(), name


@pytest.mark.parametrize('causal', [False, True])
def test_the_gradient_of_zero_keys_with_small_queries_and_large_values(causal):
    """Each score's gradient is beyond float32; that of the key, after the queries' scale, is not."""
    case = make_case(12, causal=causal, dtype=torch.float32)
    case.bias[:, 10:13] += 28.0
    case.phi_q, case.v = case.phi_q * 1e-20, case.v * 1e8
    case.phi_k[0, :, 3:6] = 0
    cotangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(1))
    actual = gradients(lambda c: c.run('direct'), case, cotangent, ['phi_k'])
    double = case.map(torch.Tensor.double)
    expected = gradients(lambda c: reference.attention(**c.arguments()), double, cotangent, ['phi_k'])
    assert_gradients(actual, expected, 2e-3)


def test_a_step_that_sees_its_own_key_as_zero():
    """Its bias of 1e5 counts for nothing, so the others keep their digits."""
    case = make_case(5, causal=True, dtype=torch.float32)
    case = dataclasses.replace(case, bias=torch.full((2, 1), 1e5), far=torch.zeros(2))
    case.phi_k[:, :, 4] = 0
    weights = case.phi_q[:, :, 4:].double() @ case.phi_k.double().transpose(-1, -2)  # far is all that is left
    expected = (weights @ case.v.double() / weights.sum(-1, keepdim=True))[:, :, 0]
    torch.testing.assert_close(case.run('step')[:, :, 4].double(), expected, rtol=1e-5, atol=1e-6)


# Overflow


@pytest.mark.parametrize('scale', [1e15, 1e25, 1e30])
@pytest.mark.parametrize('backend', ['direct', 'fft', 'window', 'auto'])
def test_large_values_with_large_causal_features(backend, scale):
    """Causal keys may reach e^60 (docs/math.md, "Features"): times values of 1e15 that is more than float32 holds."""
    w = draw_projection(2, 32, 4)
    x = torch.randn(2, 2, 2, 40, 4, generator=torch.Generator().manual_seed(0))
    case = causal_case(backend, 40)
    roles = zip(x, ('query', 'key'))
    case.phi_q, case.phi_k = (feature_map(y, w, role=role, causal=True) for y, role in roles)
    case.phi_k, case.v = case.phi_k * (1e24 / case.phi_k.max()), torch.randn(2, 2, 40, 3) * scale
    assert_output(case.run(backend), case, tolerance('direct', torch.float32))
    for name, g in gradients(lambda c: c.run(backend), case, torch.ones_like(case.v) / scale, ['phi_q', 'v']).items():
        assert g.isfinite().all(), name


def test_denominators_that_overflow():
    case = make_case(grid_size=(4, 5), dtype=torch.float32)
    case.phi_q, case.phi_k = case.phi_q * 1e20, case.phi_k * 1e20
    for backend in ('direct', 'fft'):
        assert_output(case.run(backend), case, 1e-3)
