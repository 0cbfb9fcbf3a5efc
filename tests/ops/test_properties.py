"""What holds for every input, searched by hypothesis."""

from dataclasses import replace

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from .compare import Case, assert_output, check, make_case, table_shape, tolerance

seeds = st.integers(0, 2**16)
sides = st.integers(1, 7)
dtypes = st.sampled_from([torch.float32, torch.float64])
with_bias = st.sampled_from(['direct', 'fft', 'auto'])
without_bias = st.sampled_from(['direct', 'linear', 'auto'])


@st.composite
def cases(draw, causal=None, std=(0.0, 3.0), bias=True):
    """Any small case: grid or sequence, causal or not, any number of heads, features and columns."""
    on_grid = causal is None and draw(st.booleans())
    shape = {'grid_size': (draw(sides), draw(sides))} if on_grid else {'n': draw(st.integers(1, 40))}
    if not on_grid:
        shape['causal'] = draw(st.booleans()) if causal is None else causal
    return make_case(
        **shape,
        batch=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        m=draw(st.integers(1, 9)),
        d=draw(st.integers(1, 5)),
        std=draw(st.floats(*std)) if bias else None,
        dtype=draw(dtypes),
        seed=draw(seeds),
    )


def assert_same(actual, expected, case, backend):
    """Equal to within the tolerance of each, relative to the terms of each element."""
    scale = case.weights() @ case.v.double().abs()
    allowed = 2 * tolerance(backend, case.v.dtype) * scale + torch.finfo(torch.float32).tiny
    assert ((actual.double() - expected.double()).abs() <= allowed).all()


@given(case=cases(), backend=with_bias)
def test_any_shape_equals_the_oracle(case, backend):
    check(case, backend)


@given(case=cases(bias=False), backend=without_bias)
def test_any_shape_without_bias_equals_the_oracle(case, backend):
    check(case, backend)


@given(case=cases())
def test_backends_agree(case):
    direct = case.run('direct')
    for backend in ('fft', 'auto', *(['step'] if case.causal else [])):
        assert_same(case.run(backend), direct, case, 'fft')


@given(case=cases(), backend=with_bias)
def test_constant_values_give_constant_output(case, backend):
    """Rows of weights sum to one."""
    case.v = case.v[:, :, :1].expand_as(case.v)
    torch.testing.assert_close(case.run(backend), case.v, rtol=tolerance(backend, case.v.dtype), atol=0)


@given(case=cases(bias=False), backend=with_bias, constant=st.floats(-80, 80))
def test_a_constant_bias_is_no_bias(case, backend, constant):
    heads, n = case.v.shape[1:3]
    biased = replace(case, bias=case.v.new_full((heads, *table_shape(n, case.grid_size)), constant))
    assert_same(biased.run(backend), case.run('direct'), case, backend)


@given(case=cases(), backend=with_bias, constant=st.floats(-20, 20))
def test_adding_a_constant_to_the_bias_changes_nothing(case, backend, constant):
    shifted = replace(case, bias=case.bias + constant)
    # in float32 the sum above has rounded the bias itself
    assert_same(shifted.run(backend), case.run(backend), case, 'fft')


@given(case=cases(), backend=with_bias)
def test_a_zero_bias_gradient_sums_to_zero(case, backend):
    """A constant added to the bias cancels, so its gradient has no component along it."""
    case.bias = case.bias.clone().requires_grad_()
    case.run(backend).square().sum().backward()
    g = case.bias.grad.flatten(1).double()
    assert (g.sum(1).abs() <= 2e-3 * (g.abs().sum(1) + case.v.double().square().sum())).all()


@given(case=cases(causal=True), backend=st.sampled_from(['direct', 'fft', 'auto', 'step']), data=st.data())
def test_causal_never_looks_ahead(case, backend, data):
    t = data.draw(st.integers(1, case.v.shape[2]))
    past = case.prefix(t)
    assert_same(case.run(backend)[:, :, :t], past.run('direct'), past, backend)


@given(case=cases(bias=False), backend=without_bias, seed=seeds)
def test_without_bias_order_does_not_matter(case, backend, seed):
    case.causal = False
    order = torch.randperm(case.v.shape[2], generator=torch.Generator().manual_seed(seed))
    shuffled = case.map(lambda x: x[:, :, order])
    assert_same(shuffled.run(backend), case.run(backend)[:, :, order], shuffled, backend)


def test_with_bias_order_matters():
    case = make_case(grid_size=(4, 4))
    order = torch.arange(16).roll(1)
    shuffled = replace(case.map(lambda x: x[:, :, order] if x.dim() == 4 else x))
    difference = (shuffled.run('direct') - case.run('direct')[:, :, order]).abs()
    assert difference.max() > 1e-3


def embed(x, grid_size, canvas, corner):
    """Tokens of a small grid at a place of a larger one, zeros elsewhere."""
    small = x.unflatten(2, grid_size)
    large = x.new_zeros(*x.shape[:2], *canvas, x.shape[3])
    (height, width), (top, left) = grid_size, corner
    large[:, :, top : top + height, left : left + width] = small
    return large.flatten(2, 3)


@given(
    grid_size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    margin=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    backend=with_bias,
    dtype=dtypes,
    seed=seeds,
    data=st.data(),
)
def test_a_shifted_input_shifts_the_output(grid_size, margin, backend, dtype, seed, data):
    """Keys outside the content have zero features and do not count, so its place on the canvas does not matter."""
    canvas = (grid_size[0] + margin[0], grid_size[1] + margin[1])
    corners = [tuple(data.draw(st.integers(0, side)) for side in margin) for _ in range(2)]
    assume(corners[0] != corners[1])
    content = make_case(grid_size=grid_size, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(2, *table_shape(None, canvas), generator=generator).to(dtype)
    # queries everywhere: outside the content they may be anything
    outputs = []
    for top, left in corners:
        phi_k, v = (embed(x, grid_size, canvas, (top, left)) for x in (content.phi_k, content.v))
        phi_q = embed(content.phi_q - 1, grid_size, canvas, (top, left)) + 1
        z = Case(phi_q, phi_k, v, bias, None, canvas).run(backend).unflatten(2, canvas)
        outputs.append(z[:, :, top : top + grid_size[0], left : left + grid_size[1]].flatten(2, 3))
    (extra_y, extra_x), (rows, columns) = margin, bias.shape[1:]
    content.bias = bias[:, extra_y : rows - extra_y, extra_x : columns - extra_x]
    for z in outputs:
        assert_output(z, content, tolerance(backend, dtype))
    assert_same(*outputs, content, backend)


@given(n=st.integers(1, 12), shift=st.integers(1, 8), backend=with_bias, causal=st.booleans(), seed=seeds)
def test_a_shifted_sequence_shifts_the_output(n, shift, backend, causal, seed):
    content = make_case(n, causal=causal, seed=seed)
    bias = torch.randn(2, 2 * (n + shift) - 1, generator=torch.Generator().manual_seed(seed)).double()
    before = content.map(lambda x: torch.nn.functional.pad(x, (0, 0, shift, 0)) if x.dim() == 4 else bias)
    before.phi_q[:, :, :shift] = 1.0
    # the padding has no keys to see when causal: give it its own, which the content would see were the mask wrong
    content.bias = bias[:, shift : bias.shape[1] - shift]
    if causal:
        before = content.map(
            lambda x: torch.nn.functional.pad(x, (0, 0, 0, shift), value=7.0) if x.dim() == 4 else bias
        )
        assert_output(before.run(backend)[:, :, :n], content, tolerance(backend, torch.float64))
    else:
        assert_output(before.run(backend)[:, :, shift:], content, tolerance(backend, torch.float64))


@given(case=cases(), backend=with_bias, seed=seeds)
def test_batch_items_and_heads_are_independent(case, backend, seed):
    batch, heads = case.v.shape[:2]
    together = case.run(backend)
    b, h = seed % batch, seed % heads
    alone = case.map(lambda x: x[b : b + 1, h : h + 1] if x.dim() == 4 else x[h : h + 1])
    assert_same(alone.run(backend), together[b : b + 1, h : h + 1], alone, 'fft')


@given(case=cases(), backend=with_bias)
def test_output_is_linear_in_the_values(case, backend):
    doubled = replace(case, v=-2 * case.v)
    assert_same(doubled.run(backend), -2 * case.run(backend), doubled, backend)


@given(case=cases(), backend=with_bias)
def test_a_mirrored_grid_mirrors_the_output(case, backend):
    """Reversing all tokens is reversing the table; causal sequences have a direction."""
    assume(not case.causal)
    mirrored = replace(
        case.map(lambda x: x.flip(2) if x.dim() == 4 else x.flip(tuple(range(1, x.dim())))),
    )
    assert_same(mirrored.run(backend), case.run(backend).flip(2), mirrored, backend)


@given(case=cases(), backend=with_bias)
def test_a_transposed_grid_transposes_the_output(case, backend):
    assume(case.grid_size is not None)
    height, width = case.grid_size

    def transpose(x):
        return x.unflatten(2, (height, width)).transpose(2, 3).flatten(2, 3) if x.dim() == 4 else x.mT

    transposed = replace(case.map(transpose), grid_size=(width, height))
    assert_same(transposed.run(backend), transpose(case.run(backend)), transposed, backend)
