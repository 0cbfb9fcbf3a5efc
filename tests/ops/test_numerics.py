"""Where rounding bites: wide biases, sparse values, half precision, causality, and what may never be allocated."""

from dataclasses import replace

import pytest
import torch

from nprf_vit.ops import draw_projection, feature_map, kernel_attention, reference

from .compare import GRADIENT_TOLERANCE, assert_output, check, make_case, tolerance

BACKENDS = ['direct', 'fft', 'auto']
DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
SHAPES = [
    pytest.param({'grid_size': (7, 14)}, id='7x14'),
    pytest.param({'grid_size': (17, 19)}, id='17x19'),
    pytest.param({'n': 257}, id='seq257'),
    pytest.param({'n': 37, 'causal': True}, id='causal37'),
    pytest.param({'n': 600, 'causal': True}, id='causal600'),
]


# Width of the bias


@DTYPES
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('std', [0.02, 2.0, 5.0])
@pytest.mark.parametrize('shape', SHAPES)
def test_bias_widths(shape, std, backend, dtype):
    check(make_case(**shape, std=std, dtype=dtype), backend)


@DTYPES
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('shape', [*SHAPES, pytest.param({'n': 257, 'causal': True}, id='causal257')])
def test_a_far_peak_that_border_tokens_cannot_see(shape, backend, dtype):
    """b = 0 but for +30 at the farthest offset: two tokens see it, for all others everything else is rounding."""
    case = make_case(**shape, dtype=dtype)
    case.bias = torch.zeros_like(case.bias)
    case.bias.view(2, -1)[:, 0] = 30.0
    check(case, backend)


@DTYPES
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('shape', SHAPES)
def test_a_nearby_peak(shape, backend, dtype):
    case = make_case(**shape, dtype=dtype)
    case.bias = torch.zeros_like(case.bias)
    centre = case.bias[0].numel() // 2
    case.bias.view(2, -1)[:, centre - 2] = 30.0
    check(case, backend)


@DTYPES
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('apart', [10.0, 30.0, 80.0])
@pytest.mark.parametrize('shape', [*SHAPES[:2], pytest.param({'n': 1000, 'causal': True}, id='causal1000')])
def test_heads_whose_biases_lie_apart(shape, apart, backend, dtype):
    """A constant added to one head's bias changes nothing; each head is scaled by itself."""
    case = make_case(**shape, std=1.0, dtype=dtype)
    case.bias[1] += apart
    check(case, backend)


@DTYPES
def test_causal_fft_at_the_edge_of_one_maximum_per_head(dtype):
    """Whether the blocks on the diagonal are scaled by rows is decided alike for all offsets and for theirs."""
    for spread in (19.999999, 20.0, 20.000001):
        case = make_case(600, causal=True, batch=1, std=0.0, dtype=dtype)
        case.bias[:, 590] = torch.tensor([spread, spread + 3e-7], dtype=torch.float64).to(dtype)
        check(case, 'fft')


@pytest.mark.parametrize('backend', [*BACKENDS, 'window'])
@pytest.mark.parametrize('peak', [6.0, 9.0, 12.0, 15.0, 18.0, 20.0, 25.0, 30.0, 80.0])
@pytest.mark.parametrize('shape', [SHAPES[0], SHAPES[3], pytest.param({'n': 90}, id='seq90')])
def test_gradients_under_a_peak_that_every_row_sees(shape, peak, backend):
    """Attention is nearly one-hot: gradients are differences of almost equal numbers, g·v_j - g·z_i."""
    case = make_case(**shape, dtype=torch.float32)
    case.bias.view(2, -1)[0, case.bias[0].numel() // 2] += peak
    if backend == 'window':
        rows = (slice(None), *(slice(s // 2 - 2, s // 2 + 3) for s in case.bias.shape[1:]))
        case = replace(case, bias=case.bias[rows].contiguous(), far=torch.tensor([0.1, -0.3]))
    check(replace(case, **{n: x[:, :1] if x.dim() == 4 else x[:1] for n, x in case.tensors().items()}), backend)
    check(case, backend)


def signs(case):
    generator = torch.Generator().manual_seed(3)
    return (torch.randint(0, 2, case.bias.shape, generator=generator) * 160.0 - 80.0).to(case.bias.dtype)


EXTREMES = {
    'high': lambda case: torch.full_like(case.bias, 80.0),
    'low': lambda case: torch.full_like(case.bias, -80.0),
    'mixed': signs,
    # the one offset that every token sees is the lowest
    'dip': lambda case: torch.full_like(case.bias, 80.0).index_fill_(-1, torch.tensor(case.bias.shape[-1] // 2), -80.0),
    # and the only one seen when causal; all that is invisible is high
    'future': lambda case: (
        torch.where(torch.arange(case.bias.shape[-1]) > case.bias.shape[-1] // 2, 80.0, -80.0)
        .expand_as(case.bias)
        .to(case.bias.dtype)
    ),
}


@DTYPES
@pytest.mark.parametrize('backend', ['direct', 'fft'])
@pytest.mark.parametrize('extreme', EXTREMES)
@pytest.mark.parametrize(
    'shape',
    [
        pytest.param({'grid_size': (1, 1)}, id='1x1'),
        pytest.param({'grid_size': (3, 2)}, id='3x2'),
        pytest.param({'grid_size': (7, 14)}, id='7x14'),
        pytest.param({'n': 1}, id='seq1'),
        pytest.param({'n': 37}, id='seq37'),
        pytest.param({'n': 37, 'causal': True}, id='causal37'),
        pytest.param({'n': 600, 'causal': True}, id='causal600'),
    ],
)
def test_biases_of_80(shape, extreme, backend, dtype):
    case = make_case(**shape, dtype=dtype)
    case.bias = EXTREMES[extreme](case)
    check(case, backend)


@DTYPES
@pytest.mark.parametrize('extreme', EXTREMES)
def test_biases_of_80_step_by_step(extreme, dtype):
    case = make_case(37, causal=True, dtype=dtype)
    case.bias = EXTREMES[extreme](case)
    check(case, 'step', names=())


@pytest.mark.parametrize('far', [-80.0, 80.0])
@pytest.mark.parametrize('backend', BACKENDS)
def test_a_far_field_of_80(far, backend):
    case = make_case(grid_size=(9, 8), dtype=torch.float32)
    case.bias, case.far = torch.randn(2, 5, 5), torch.full((2,), far)
    check(case, backend)


def test_the_first_causal_token_returns_its_own_value():
    case = make_case(37, causal=True, std=5.0, dtype=torch.float32)
    for backend in ('direct', 'fft', 'auto', 'step'):
        torch.testing.assert_close(case.run(backend)[:, :, 0], case.v[:, :, 0], rtol=1e-5, atol=0)


@pytest.mark.parametrize('std', [0.02, 0.5, 2.0])
@pytest.mark.parametrize('shape', [{'grid_size': (17, 19)}, {'n': 600, 'causal': True}], ids=['17x19', 'causal600'])
def test_fft_transforms_within_its_range(shape, std):
    """Other rounding than `direct` means that another algorithm ran: `fft` is tested for itself above."""
    case = make_case(**shape, std=std, dtype=torch.float32)
    assert not torch.equal(case.run('fft'), case.run('direct'))


@pytest.mark.parametrize('shape', [{'grid_size': (17, 19)}, {'n': 600, 'causal': True}], ids=['17x19', 'causal600'])
def test_fft_hands_wider_biases_over(shape):
    case = make_case(**shape, std=40.0, dtype=torch.float32)
    assert torch.equal(case.run('fft'), case.run('direct'))


# Values that leave most terms of a sum at zero: an error relative to the whole sum is not good enough.


def one_hot(v):
    v = torch.zeros_like(v)
    v[:, :, v.shape[2] // 3] = 1.0
    return v


def sparse(v):
    keep = torch.rand(v.shape, generator=torch.Generator().manual_seed(5)) < 0.05
    return v * keep


def last_is_huge(v):
    v = v.clone()
    v[:, :, -1] *= 1e4
    return v


@DTYPES
@pytest.mark.parametrize(
    ('backend', 'std'),
    [('linear', None), *((backend, std) for backend in ('direct', 'fft') for std in (0.02, 2.0, 5.0))],
)
@pytest.mark.parametrize('values', [one_hot, sparse, last_is_huge])
@pytest.mark.parametrize('shape', SHAPES)
def test_adversarial_values(shape, values, backend, std, dtype):
    case = make_case(**shape, std=std, dtype=dtype)
    case.v = values(case.v)
    assert_output(case.run(backend), case, tolerance('fft', dtype))


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('shape', SHAPES)
def test_adversarial_features(shape, backend):
    """Features over e^20 and keys of very different size, as raw inputs give them."""
    case = make_case(**shape, std=0.5, dtype=torch.float32)
    generator = torch.Generator().manual_seed(9)
    size = torch.randn(case.phi_k.shape[:3], generator=generator)[..., None].mul(5).exp()
    case.phi_k = case.phi_k * size
    case.phi_q = case.phi_q * (2 * torch.randn(case.phi_q.shape, generator=generator)).exp()
    check(case, backend)


@pytest.mark.parametrize('scale', [1e-12, 1e12])
@pytest.mark.parametrize('backend', [*BACKENDS, 'linear'])
def test_the_scale_of_features_cancels(scale, backend):
    case = make_case(grid_size=(7, 14), std=None if backend == 'linear' else 0.5, dtype=torch.float32)
    case.phi_q = case.phi_q * scale
    assert_output(case.run(backend), case, tolerance(backend, torch.float32))


@pytest.mark.parametrize('backend', [*BACKENDS, 'linear'])
def test_zero_queries_and_keys(backend):
    """‖q‖ = 0: features are constant, weights follow keys and bias alone."""
    w = draw_projection(2, 6, 4)
    x = torch.zeros(2, 2, 12, 4)
    case = make_case(grid_size=(4, 3), std=None if backend == 'linear' else 0.5, dtype=torch.float32)
    case.phi_q, case.phi_k = feature_map(x, w, role='query'), feature_map(x, w, role='key')
    check(case, backend)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('std', [2.0, 5.0])
@pytest.mark.parametrize('d', [4, 16, 64])
def test_raw_inputs_with_a_wide_bias(d, std, causal):
    """Norms of 20 before the d^-¼ scale and a wide bias at once; the oracle works on logarithms."""
    generator = torch.Generator().manual_seed(d)
    x = torch.nn.functional.normalize(torch.randn(2, 1, 2, 30, d, generator=generator), dim=-1) * 20 / d**0.25
    w, v = draw_projection(2, 32, d), torch.randn(1, 2, 30, d, generator=generator)
    bias = std * torch.randn(2, 59, generator=generator)
    phi_q, phi_k = feature_map(x[0], w, role='query', causal=causal), feature_map(x[1], w, role='key', causal=causal)
    z = kernel_attention(phi_q, phi_k, v, bias, causal=causal, backend='direct')
    logs = (reference.log_features(t.double(), w.double()) for t in x)
    a = reference.log_attention_weights(*logs, bias=bias.double(), causal=causal)
    assert ((z - a @ v.double()).abs() <= 1e-3 * (a @ v.double().abs())).all()


# Causality


def with_a_different_future(case, t):
    generator = torch.Generator().manual_seed(11)
    case = case.map(torch.clone)
    n = case.v.shape[2]
    for x, scale in ((case.phi_q, 1e3), (case.phi_k, 1e3), (case.v, 1e6)):
        x[:, :, t:] *= scale * torch.rand(x[:, :, t:].shape, generator=generator).to(x.dtype)
    if case.bias is not None:
        case.bias[:, n:] += 50.0
    return case


@pytest.mark.parametrize('batch', [1, 2])
@pytest.mark.parametrize(
    ('backend', 'std', 'n'),
    [
        *((backend, std, n) for backend in ('direct', 'step') for std in (None, 0.5, 5.0) for n in (5, 37, 300)),
        *(('linear', None, n) for n in (5, 37, 300, 1100)),
        *(('fft', std, n) for std in (0.5, 5.0) for n in (5, 37, 300, 1100)),
        ('direct', 0.5, 1100),
    ],
)
def test_causal_never_looks_ahead(backend, std, n, batch):
    case = make_case(n, causal=True, batch=batch, m=4, std=std, dtype=torch.float32)
    before = case.run(backend)
    for t in {1, n // 2, n - 1}:
        changed = with_a_different_future(case, t)
        after = changed.run(backend)[:, :, :t]
        if backend == 'fft':
            assert_output(after, case.prefix(t), tolerance('fft', torch.float32))
        else:
            assert torch.equal(before[:, :, :t], after), f'tokens from {t} on changed an earlier output'


def test_looking_ahead_would_be_noticed():
    case = make_case(37, causal=True, dtype=torch.float32)
    leaky = replace(case, causal=False)
    changed = with_a_different_future(leaky, 20)
    assert not torch.equal(leaky.run('direct')[:, :, :20], changed.run('direct')[:, :, :20])


# Half precision

HALVES = pytest.mark.parametrize('half', [torch.bfloat16, torch.float16], ids=['bfloat16', 'float16'])


def assert_rounded_once(z, case):
    """Each element within half a unit in its own last place, plus what float32 sums of a few hundred terms are off."""
    a, v = case.weights(), case.v.double()
    expected, scale = a @ v, a @ v.abs()
    unit = torch.finfo(z.dtype).eps / 2
    allowed = 1.001 * unit * expected.abs() + 1e-5 * scale
    worst = ((z.double() - expected).abs() / allowed).max()
    assert worst <= 1, f'{worst:.2f} times the rounding of {z.dtype}'


def relative_error(z, case):
    expected = case.weights() @ case.v.double()
    return ((z.double() - expected).abs() / expected.abs()).mean()


@HALVES
@pytest.mark.parametrize('backend', ['direct', 'fft', 'auto', 'linear'])
@pytest.mark.parametrize(
    'shape', [pytest.param({'grid_size': (7, 14)}, id='7x14'), pytest.param({'n': 300, 'causal': True}, id='causal300')]
)
def test_half_precision_inputs(shape, backend, half):
    case = make_case(**shape, std=None if backend == 'linear' else 2.0, dtype=half)
    z = case.run(backend)
    assert z.dtype == half
    assert_rounded_once(z, case)
    # the equation in half precision throughout, for comparison
    naive = reference.attention(**case.arguments())
    assert relative_error(z, case) < relative_error(naive, case) / 2
    with pytest.raises(AssertionError, match='times the rounding'):
        assert_rounded_once(naive, case)


@HALVES
@pytest.mark.parametrize('backend', ['direct', 'fft', 'auto', 'linear'])
def test_half_precision_gradients(backend, half):
    case = make_case(grid_size=(7, 14), std=None if backend == 'linear' else 2.0, dtype=half)
    # each gradient is rounded once (eps/2 per element), and the output's own rounding does not enter
    check(case, backend, forward_tol=2 * torch.finfo(half).eps, gradient_tol=torch.finfo(half).eps)


@HALVES
@pytest.mark.parametrize('backend', ['direct', 'fft', 'auto', 'linear'])
def test_float32_features_with_half_values(backend, half):
    """What a layer hands over under autocast."""
    case = make_case(grid_size=(7, 14), std=None if backend == 'linear' else 2.0, dtype=torch.float32)
    case.v = case.v.to(half)
    with torch.autocast('cpu', torch.bfloat16):
        z = case.run(backend)
    assert z.dtype == half
    assert_rounded_once(z, case)
    leaves = {name: t.clone().requires_grad_() for name, t in case.tensors().items()}
    with torch.autocast('cpu', torch.bfloat16):
        replace(case, **leaves).run(backend).float().square().sum().backward()
    for name, t in leaves.items():
        assert t.grad.dtype == t.dtype, name
        assert t.grad.isfinite().all(), name


@pytest.mark.parametrize('backend', ['direct', 'fft', 'auto', 'linear', 'step'])
def test_autocast_changes_nothing_in_float32(backend):
    case = make_case(31, causal=True, std=None if backend == 'linear' else 2.0, dtype=torch.float32)
    outside = case.run(backend)
    with torch.autocast('cpu', torch.bfloat16):
        inside = case.run(backend)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)


@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear'])
def test_autocast_changes_no_gradient_in_float32(backend):
    case = make_case(grid_size=(7, 6), std=None if backend == 'linear' else 2.0, dtype=torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        check(case, backend, gradient_tol=GRADIENT_TOLERANCE[torch.float32])


# Memory


def allocations(function):
    """Bytes of the largest single CPU allocation, and the most that was alive above the start.

    The profiler hooks the allocator, so it sees inside custom ops and autograd, where a dispatch mode does not.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == '[memory]']
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return max(e.nbytes() for e in events), peak


def assert_lean(function, case):
    """No single allocation as large as all scores, or as all features times all value columns."""
    batch, heads, n, m = case.phi_q.shape
    largest, _ = allocations(function)
    quadratic, all_channels = (4 * batch * heads * n * size for size in (n, m * case.v.shape[3]))
    limit = min(quadratic, all_channels)
    assert largest < limit, (
        f'an allocation of {largest} bytes: B·heads·n·n is {quadratic}, B·heads·n·m·d {all_channels}'
    )


def forward_and_backward(case, function):
    leaves = {name: t.clone().requires_grad_() for name, t in case.tensors().items()}

    def run():
        function(replace(case, **leaves)).sum().backward()

    return run


LONG = [  # so long that the tiles of fixed size, up to 16 MB when sheared, are less than n·n
    pytest.param({'grid_size': (48, 48)}, id='48x48'),
    pytest.param({'grid_size': (8, 256)}, id='8x256'),
    pytest.param({'n': 2048}, id='seq2048'),
    pytest.param({'n': 2048, 'causal': True}, id='causal2048'),
]


@pytest.mark.parametrize(
    ('backend', 'std'), [('direct', 0.5), ('direct', 5.0), ('fft', 0.5), ('fft', 5.0), ('auto', 0.5), ('linear', None)]
)
@pytest.mark.parametrize('batch', [1, 2], ids=['B1', 'B2'])
@pytest.mark.parametrize('shape', LONG)
def test_nothing_quadratic_is_allocated(shape, batch, backend, std):
    case = make_case(**shape, batch=batch, heads=2, m=32, d=64, std=std, dtype=torch.float32)
    with torch.no_grad():
        assert_lean(lambda: case.run(backend), case)
    assert_lean(forward_and_backward(case, lambda c: c.run(backend)), case)


def peak_growth(function, **shape):
    """How much more memory twice as many tokens take at their peak, forward and backward."""
    cases = [make_case(n, batch=1, m=8, d=8, dtype=torch.float32, **shape) for n in (1024, 2048)]
    peaks = [allocations(forward_and_backward(case, function))[1] for case in cases]
    return peaks[1] / peaks[0]


@pytest.mark.parametrize(('backend', 'std'), [('direct', 0.5), ('direct', 5.0), ('fft', 0.5), ('linear', None)])
@pytest.mark.parametrize('causal', [False, True])
def test_peak_memory_does_not_grow_quadratically(causal, backend, std):
    # linear growth doubles it; what has a fixed size makes it less
    assert peak_growth(lambda c: c.run(backend), causal=causal, std=std) < 2.3


def test_quadratic_growth_is_noticed():
    assert peak_growth(lambda c: reference.attention(**c.arguments())) > 3.5


def test_a_quadratic_allocation_is_noticed():
    case = make_case(grid_size=(32, 32), batch=1, heads=1, m=32, d=64, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r'B·heads·n·n is 4194304'):
        assert_lean(forward_and_backward(case, lambda c: reference.attention(**c.arguments())), case)


def test_an_all_channels_allocation_is_noticed():
    case = make_case(grid_size=(32, 64), batch=1, heads=1, m=32, d=8, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r'B·heads·n·m·d 2097152'):
        assert_lean(lambda: case.phi_k[..., None] * case.v[..., None, :], case)


@pytest.mark.parametrize('backend', ['direct', 'fft', 'window'])
def test_a_later_token_that_underflows_changes_no_earlier_one(backend):
    generator = torch.Generator().manual_seed(0)
    n = 40
    phi_q, phi_k = (torch.rand(1, 1, n, 4, generator=generator) + 0.1 for _ in range(2))
    v, bias = torch.randn(1, 1, n, 3, generator=generator), torch.randn(1, 2 * n - 1, generator=generator)
    far = torch.zeros(1) if backend == 'window' else None
    bias = bias[:, n - 6 : n + 5] if far is not None else bias
    tiny = phi_q.clone()
    tiny[:, :, -1] *= 1e-35  # a factor per query cancels
    first, second = (kernel_attention(q, phi_k, v, bias, far, None, True, backend) for q in (phi_q, tiny))
    assert torch.equal(first[:, :, :-1], second[:, :, :-1])
    torch.testing.assert_close(first[:, :, -1], second[:, :, -1], rtol=1e-4, atol=1e-5)
