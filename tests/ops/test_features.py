import pytest
import torch

from nprf_vit.ops import draw_projection, feature_map, kernel_attention, reference

from .compare import Case, assert_gradients

KINDS = ['prf', 'orf', 'sphere', 'trf', 'elu']
POSITIVE = [kind for kind in KINDS if kind != 'trf']


def tokens(*shape, norm=1.0, seed=0, dtype=torch.float64):
    # 1000: with the seed of `draw_projection` the first tokens would be rows of w
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
    return (torch.nn.functional.normalize(x, dim=-1) * norm).to(dtype)


# Projections


@pytest.mark.parametrize('kind', KINDS)
def test_projections_are_reproducible(kind):
    w = draw_projection(3, 10, 4, kind)
    assert w.shape == (3, 10, 4)
    assert w.dtype == torch.float32
    assert w.device.type == 'cpu'
    torch.manual_seed(123)
    state = torch.get_rng_state()
    with torch.device('meta'):  # timm builds models there; the draw may follow neither device nor default dtype
        assert torch.equal(draw_projection(3, 10, 4, kind), w)
    assert torch.equal(torch.get_rng_state(), state), 'the draw used the global generator'
    assert torch.equal(draw_projection(3, 10, 4, kind, torch.Generator().manual_seed(0)), w)


@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind != 'elu'])
def test_projections_follow_their_generator_and_differ_between_heads(kind):
    generator = torch.Generator().manual_seed(7)
    first, second = (draw_projection(2, 10, 4, kind, generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, draw_projection(2, 10, 4, kind))


@pytest.mark.parametrize('kind', ['prf', 'orf', 'trf'])
def test_gaussian_moments(kind):
    w = draw_projection(200, 24, 8, kind).double()
    samples = w.flatten(0, 1)  # 4800, D
    assert samples.mean(0).abs().max() < 0.06  # 4 standard errors
    torch.testing.assert_close(samples.T @ samples / len(samples), torch.eye(8, dtype=w.dtype), rtol=0, atol=0.09)
    norms = samples.square().sum(-1)  # chi-squared with 8 degrees: mean 8, variance 16
    assert abs(norms.mean() - 8) < 0.25
    assert abs(norms.var() - 16) < 2.5


def test_orthogonal_blocks():
    w = draw_projection(5, 10, 4, 'orf').double()
    for block in (w[:, :4], w[:, 4:8], w[:, 8:]):
        rows = torch.nn.functional.normalize(block, dim=-1)
        identity = torch.eye(rows.shape[1], dtype=w.dtype).expand(5, -1, -1)
        torch.testing.assert_close(rows @ rows.mT, identity, rtol=0, atol=1e-6)
    rows = torch.nn.functional.normalize(draw_projection(5, 10, 4, 'prf').double()[:, :4], dim=-1)
    assert (rows @ rows.mT - torch.eye(4)).abs().max() > 0.1  # a Gaussian draw would be noticed


def test_sphere_radius():
    torch.testing.assert_close(draw_projection(2, 50, 9, 'sphere').norm(dim=-1), torch.full((2, 50), 3.0))


# Feature maps


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_stabiliser_is_a_factor_that_cancels(kind, causal):
    """φ equals the equation up to one factor per token (query), or per head and batch item (key)."""
    x, w = tokens(2, 3, 5, 4, norm=2.0), draw_projection(3, 6, 4, kind).double()
    exact = reference.features(x, w, kind)
    query = feature_map(x, w, kind, 'query', causal) / exact
    key = feature_map(x, w, kind, 'key', causal) / exact
    assert query.shape == key.shape == (2, 3, 5, {'elu': 4, 'trf': 12}.get(kind, 6))
    torch.testing.assert_close(query, query[..., :1].expand_as(query))
    torch.testing.assert_close(key, key[..., :1, :1].expand_as(key))
    if kind == 'elu':
        torch.testing.assert_close(query, torch.ones_like(query))


@pytest.mark.parametrize('kind', ['prf', 'trf'])
def test_a_stabiliser_per_key_is_noticed(kind):
    """A public re-implementation divides each key by its own maximum, which does not cancel."""
    x, w = tokens(2, 3, 5, 4, norm=2.0) * torch.linspace(0.5, 1, 5)[:, None], draw_projection(3, 6, 4, kind).double()
    key = reference.features(x, w, kind)
    key = key / key.amax(-1, keepdim=True) / reference.features(x, w, kind)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(key, key[..., :1, :1].expand_as(key))


@pytest.mark.parametrize('kind', KINDS)
def test_attention_and_gradients_do_not_depend_on_the_stabiliser(kind):
    x = tokens(2, 2, 3, 5, 4, norm=1.5)
    w, v = draw_projection(3, 6, 4, kind).double(), tokens(2, 3, 5, 4, seed=1)
    x[0, :, :, 1], x[1, :, :, 2] = 0, 0  # where elu has its kink, and a layer that starts at zero its first gradient
    if kind == 'trf':
        x = x / 5  # keeps every denominator away from zero

    def gradients(phi):
        leaf = x.clone().requires_grad_()
        z = reference.attention(phi(leaf[0], 'query'), phi(leaf[1], 'key'), v)
        return {'x': torch.autograd.grad((z * v).sum(), leaf)[0]}

    exact = gradients(lambda x, role: reference.features(x, w, kind))
    for causal in (False, True):
        assert_gradients(gradients(lambda x, role: feature_map(x, w, kind, role, causal)), exact, 1e-10)  # noqa: B023


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('role', ['query', 'key'])
@pytest.mark.parametrize('kind', KINDS)
def test_normalize_is_normalizing_first(kind, role, causal):
    x = tokens(2, 3, 5, 4) * torch.tensor([1e-3, 0.1, 1.0, 7.0, 1e3])[:, None]
    w, g = draw_projection(3, 6, 4, kind).double(), torch.Generator().manual_seed(1)

    def features_and_gradient(phi):
        leaf = x.clone().requires_grad_()
        features = phi(leaf)
        # up to the factor: per query, or per head and batch item of keys
        features = features / features.norm(dim=-1 if role == 'query' else (-2, -1), keepdim=True)
        cotangent = torch.randn(features.shape, generator=g.manual_seed(1), dtype=torch.float64)
        return features, torch.autograd.grad(features, leaf, cotangent)[0]

    actual = features_and_gradient(lambda x: feature_map(x, w, kind, role, causal, normalize=True))
    expected = features_and_gradient(
        lambda x: feature_map(torch.nn.functional.normalize(x, dim=-1), w, kind, role, causal)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('kind', KINDS)
def test_normalize_leaves_a_zero_vector_zero(kind):
    w, x = draw_projection(2, 6, 4, kind), torch.zeros(1, 2, 3, 4, requires_grad=True)
    phi = feature_map(x, w, kind, normalize=True)
    assert torch.equal(phi, feature_map(x, w, kind))
    assert torch.autograd.grad(phi.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize('kind', KINDS)
def test_causal_features_know_no_other_token(kind):
    x, w = tokens(2, 3, 6, 4, norm=3.0, dtype=torch.float32), draw_projection(3, 6, 4, kind)
    changed = x.clone()
    changed[:, :, 4:] *= 5
    for role in ('query', 'key'):
        before, after = (feature_map(t, w, kind, role, causal=True) for t in (x, changed))
        assert torch.equal(before[:, :, :4], after[:, :, :4])
    if kind in ('prf', 'trf'):  # the maximum over all keys would have been noticed
        shrunk = torch.cat([x[:, :, :4] / 9, x[:, :, 4:]], 2)
        before, after = (feature_map(t, w, kind, 'key') for t in (shrunk, torch.cat([shrunk[:, :, :5]] * 2, 2)))
        assert not torch.equal(before[:, :, :4], after[:, :, :4])


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_half_precision_input_gets_float32_features(kind, autocast, half):
    x, w = tokens(2, 3, 5, 8).to(half), draw_projection(3, 6, 8, kind)
    exact = feature_map(x.double(), w.double(), kind)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        phi = feature_map(x, w, kind)
    assert phi.dtype == torch.float32
    torch.testing.assert_close(phi.double(), exact, rtol=2e-5, atol=2e-6 if kind == 'trf' else 0)


@pytest.mark.parametrize('kind', POSITIVE)
def test_every_feature_is_accurate_relative_to_itself(kind):
    x = tokens(2, 3, 5, 4, norm=20 / 4**0.25, dtype=torch.float32)
    x[0, 0, 0] = torch.tensor([-20 / 4**0.25, 0.0, 0.0, 0.0])
    w = draw_projection(3, 6, 4, kind)
    logs = reference.log_features(x.double(), w.double(), kind)
    query, key = (feature_map(x, w, kind, role).double().log() for role in ('query', 'key'))
    if kind != 'elu':
        logs_q, logs_k = logs - logs.amax(-1, keepdim=True), logs - logs.amax((-1, -2), keepdim=True)
        query, key = query - query.amax(-1, keepdim=True), key - key.amax((-1, -2), keepdim=True)
        seen_q, seen_k = logs_q > -60, logs_k > -80  # below, the floor
    else:
        logs_q = logs_k = logs
        seen_q = seen_k = torch.ones_like(logs, dtype=torch.bool)
    # exponents up to 150 carry 150·2^-24 ≈ 1e-5 of rounding from each of a few operations
    torch.testing.assert_close(query[seen_q], logs_q[seen_q], rtol=0, atol=1e-4)
    torch.testing.assert_close(key[seen_k], logs_k[seen_k], rtol=0, atol=1e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_zero_vectors(kind):
    w = draw_projection(2, 6, 4, kind)
    x = torch.zeros(1, 2, 3, 4, requires_grad=True)
    phi = feature_map(x, w, kind, 'query')
    (feature_map(x, w, kind, 'key') * phi).sum().backward()
    assert phi.isfinite().all()
    assert phi.sum(-1).min() > 0
    assert x.grad.isfinite().all()


def test_elu_needs_no_projection():
    x = tokens(2, 3, 5, 4)
    torch.testing.assert_close(feature_map(x, None, 'elu'), torch.nn.functional.elu(x) + 1)


# Raw inputs: norms up to 20 before the d^-¼ scale


def raw_case(d, alignment, causal, kind, seed=0):
    """(q, k, w, v): tokens of norm 20·d^-¼, random or along one row of w, plus shorter ones."""
    heads, n, m = 2, 40, 32
    norm = 20 / d**0.25
    w = draw_projection(heads, m, d, kind)
    q, k = tokens(2, 2, heads, n, d, norm=norm, seed=seed)
    rows = norm * torch.nn.functional.normalize(w.double(), dim=-1)  # K, M, D
    row = rows[torch.arange(heads), w.norm(dim=-1).argmax(-1)][:, None]  # K, 1, D: the longest
    if alignment == 'aligned':
        q[:, :, ::3], k[:, :, ::4] = row, row
    elif alignment == 'opposed':
        q[:, :, ::3], k[:, :, ::4] = row, -row
    elif alignment == 'all opposed':
        q[:], k[:] = row, -row
    elif alignment == 'each its own':
        q[:, :, :m], k[:, :, ::4] = rows, row
    elif alignment == 'lengths':
        k = k * torch.linspace(0, 1, n)[:, None]
        q = q * torch.linspace(1, 0, n)[:, None]
    return q.float(), k.float(), w, tokens(2, heads, n, d, seed=seed + 1, dtype=torch.float32)


ALIGNMENTS = ['random', 'aligned', 'opposed', 'all opposed', 'each its own', 'lengths']


@pytest.mark.parametrize('kind', ['prf', 'orf', 'sphere', 'elu'])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('alignment', ALIGNMENTS)
@pytest.mark.parametrize('d', [4, 16, 64])
def test_raw_inputs(d, alignment, causal, kind):
    q, k, w, v = raw_case(d, alignment, causal, kind)
    phi_q, phi_k = feature_map(q, w, kind, 'query', causal), feature_map(k, w, kind, 'key', causal)
    assert phi_q.isfinite().all()
    assert phi_k.isfinite().all()
    scores = torch.einsum('bkim,bkjm->bkij', phi_q, phi_k)
    assert scores.isfinite().all()
    denominators = (scores.tril() if causal else scores).sum(-1)
    assert denominators.min() > 0

    logs = [reference.log_features(t.double(), w.double(), kind) for t in (q, k)]
    weights = reference.log_attention_weights(*logs, causal=causal)
    expected, scale = weights @ v.double(), weights @ v.double().abs()
    for backend in ('direct', 'linear'):
        z = kernel_attention(phi_q, phi_k, v, causal=causal, backend=backend)
        error = ((z - expected).abs() / scale).max()
        assert error <= 1e-3, f'{backend}: {error:.1e} of the terms'


@pytest.mark.parametrize('kind', ['prf', 'orf', 'sphere', 'elu'])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('alignment', [a for a in ALIGNMENTS if a != 'all opposed'])
@pytest.mark.parametrize('d', [4, 16, 64])
def test_raw_gradients(d, alignment, causal, kind):
    """Through features and attention, relative to the largest: some true gradients are 1e-7 of the others."""
    q, k, w, v = raw_case(d, alignment, causal, kind)

    def gradients(attend, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad((attend(*leaves, w.to(dtype)) * v).sum(), leaves)

    def fast(q, k, v, w):
        features = feature_map(q, w, kind, 'query', causal), feature_map(k, w, kind, 'key', causal)
        return kernel_attention(*features, v, causal=causal, backend='direct')

    def exact(q, k, v, w):
        logs = (reference.log_features(t, w, kind) for t in (q, k))
        return reference.log_attention_weights(*logs, causal=causal) @ v

    expected = gradients(exact, torch.float64)
    largest = max(g.norm() for g in expected)
    for actual, g in zip(gradients(fast, torch.float32), expected):
        error = (actual - g).norm() / largest
        assert error <= 2e-3, f'off by {error:.1e} of the largest gradient'


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('d', [4, 16, 64])
def test_gradients_stay_finite_where_all_keys_are_floored(d, causal):
    q, k, w, v = raw_case(d, 'all opposed', causal, 'prf')
    leaves = [t.requires_grad_() for t in (q, k, v)]
    features = feature_map(q, w, 'prf', 'query', causal), feature_map(k, w, 'prf', 'key', causal)
    z = kernel_attention(*features, v, causal=causal, backend='direct')
    for g in torch.autograd.grad(z.square().sum(), leaves):
        assert g.isfinite().all()


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('d', [4, 16, 64])
def test_raw_trigonometric_features_are_finite(d, causal):
    q, k, w, _ = raw_case(d, 'lengths', causal, 'trf')
    for role, x in (('query', q), ('key', k)):
        phi = feature_map(x, w, 'trf', role, causal)
        assert phi.isfinite().all()
        assert phi.abs().sum(-1).min() > 0 or role == 'key'


# Large head dims, long keys, huge tokens


def log_attention(q, k, v, w, kind, causal):
    logs = (reference.log_features(x.double(), w.double(), kind) for x in (q, k))
    weights = reference.log_attention_weights(*logs, causal=causal)
    return weights @ v.double(), weights @ v.double().abs()


@pytest.mark.parametrize('kind', ['prf', 'orf', 'sphere'])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('d', [64, 240, 256, 512])
@pytest.mark.parametrize('aligned', [False, True])
def test_normalized_features_of_large_head_dims(d, causal, kind, aligned):
    w = draw_projection(2, 32, d, kind)
    q, k = tokens(2, 1, 2, 24, d, norm=3.0, dtype=torch.float32)
    if aligned:  # the largest and smallest features there are; attention is then so sharp that gradients cancel
        rows = torch.nn.functional.normalize(w[:, :8], dim=-1)
        q[:, :, 8:16], k[:, :, :8], k[:, :, 8:16] = rows, rows, -rows
    v = tokens(1, 2, 24, 8, seed=1, dtype=torch.float32)
    k.requires_grad_()
    features = [feature_map(x, w, kind, role, causal, normalize=True) for x, role in ((q, 'query'), (k, 'key'))]
    assert aligned or features[1].unique().numel() > 1000
    z = kernel_attention(*features, v, causal=causal, backend='direct')
    unit = [torch.nn.functional.normalize(x.double(), dim=-1) for x in (q, k)]
    expected, scale = log_attention(*unit, v, w, kind, causal)
    assert ((z - expected).abs() / scale).max() < 1e-4
    if aligned:
        return
    cotangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(0))
    actual, exact = (torch.autograd.grad(x, k, cotangent.to(x.dtype))[0] for x in (z, expected))
    assert_gradients({'k': actual}, {'k': exact}, 1e-3)


@pytest.mark.parametrize(('d', 'norm'), [(4, 15.0), (16, 14.0), (64, 12.0), (128, 12.0), (256, 12.0)])
def test_raw_causal_keys_up_to_the_stated_norm(d, norm):
    """docs/math.md, "Stabilisers": norms after the scale d^-¼, keys in any direction but along a projection."""
    w = draw_projection(2, 32, d)
    lengths = torch.linspace(0.05, 1, 40)[:, None]
    q, k = tokens(2, 1, 2, 40, d, norm=norm, dtype=torch.float32)
    v = tokens(1, 2, 40, 8, seed=1, dtype=torch.float32)
    for keys in (k, k * lengths, k * lengths.flip(0)):
        features = feature_map(q, w, 'prf', 'query', True), feature_map(keys, w, 'prf', 'key', True)
        z = kernel_attention(*features, v, causal=True, backend='direct')
        expected, scale = log_attention(q, keys, v, w, 'prf', True)
        error = ((z - expected).abs() / scale).max()
        assert error < 1e-3, f'off by {error:.1e} of the terms'


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('role', ['query', 'key'])
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('size', [1e19, 1e30, 1e36])
def test_a_norm_that_overflows_spoils_nothing(size, kind, role, causal):
    x, w = tokens(1, 2, 5, 4, dtype=torch.float32), draw_projection(2, 6, 4, kind)
    huge = x.clone()
    huge[:, 0, 3] *= 2 * size
    huge.requires_grad_()
    expected, actual = (feature_map(t, w, kind, role, causal, normalize=True) for t in (x, huge))
    others = [0, 1, 2, 4]
    assert torch.equal(actual[:, :, others], expected[:, :, others])
    assert actual.isfinite().all()
    assert torch.autograd.grad(actual.square().sum(), huge)[0].isfinite().all()


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_a_normalized_nan_spoils_no_other_token(kind, causal):
    x, w = tokens(1, 2, 5, 4, dtype=torch.float32), draw_projection(2, 6, 4, kind)
    spoilt = x.clone()
    spoilt[:, 0, 3] = float('nan')
    for role in ('query', 'key'):
        expected, actual = (feature_map(t, w, kind, role, causal, normalize=True) for t in (x, spoilt))
        assert actual[:, 0, 3].isnan().all()
        others = [0, 1, 2, 4]
        assert torch.equal(actual[:, :, others], expected[:, :, others])


# Bad input


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'kind': 'rff'}, r"'rff'.*prf, orf, sphere, trf, elu"),
        ({'role': 'value'}, r"'query' or 'key'.*'value'"),
        ({'w': torch.zeros(2, 6, 5)}, r'\(2, 6, 5\).*\(1, 2, 3, 4\)'),
        ({'w': torch.zeros(3, 6, 4)}, r'\(3, 6, 4\).*\(1, 2, 3, 4\)'),
        ({'w': torch.zeros(6, 4)}, r'\(6, 4\).*\(1, 2, 3, 4\)'),
        ({'w': None}, r'None.*\(1, 2, 3, 4\)'),
        ({'w': torch.zeros(2, 6, 4, device='meta')}, 'meta'),
        ({'x': torch.zeros(3, 4)}, r'\(3, 4\)'),
        ({'x': torch.zeros(1, 2, 3, 4, dtype=torch.long)}, 'int64'),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        feature_map(**({'x': torch.zeros(1, 2, 3, 4), 'w': torch.zeros(2, 6, 4)} | arguments))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ((2, 6, 4, 'gauss'), "'gauss'.*prf"),
        ((2, 0, 4), 'm=0'),
        ((0, 6, 4), 'heads=0'),
        ((2, 6, -1), 'd=-1'),
    ],
)
def test_bad_projections(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_projection(*arguments)


def test_prf_attention_approaches_softmax():
    """The whole chain estimates what it says it estimates: softmax(q·k) on unit vectors."""
    q, k, v = tokens(3, 1, 1, 10, 4)
    w = draw_projection(1, 100_000, 4).double()
    case = Case(feature_map(q, w, role='query'), feature_map(k, w, role='key'), v)
    # Monte Carlo: 1e5 draws leave a relative standard error of up to 2 % on a score
    torch.testing.assert_close(case.run('linear'), (q @ k.mT).softmax(-1) @ v, rtol=0, atol=0.02)
