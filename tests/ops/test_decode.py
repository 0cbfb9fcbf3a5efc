"""`DecodeState`: one token in, its output out, equal to the causal attention over everything so far."""

import pytest
import torch

from nprf_vit.ops import DecodeState

from .compare import assert_output, make_case, tolerance

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])


def decode(case, state, tokens=None):
    steps = range(case.v.shape[2]) if tokens is None else tokens
    return torch.stack([state.step(case.phi_q[:, :, t], case.phi_k[:, :, t], case.v[:, :, t]) for t in steps], 2)


@DTYPES
@pytest.mark.parametrize('batch', [1, 2], ids=['B1', 'B2'])
@pytest.mark.parametrize('std', [None, 0.02, 2.0, 5.0])
@pytest.mark.parametrize('n', [1, 2, 5, 37, 257])
def test_decoding_is_causal_attention(n, std, batch, dtype):
    case = make_case(n, causal=True, batch=batch, std=std, dtype=dtype)
    z = decode(case, DecodeState(case.bias))
    assert z.dtype == dtype
    assert_output(z, case, tolerance('step', dtype))


@pytest.mark.parametrize('window', [1, 5, 31])
def test_far(window):
    case = make_case(11, causal=True)
    case.bias, case.far = torch.randn(2, window).double(), torch.randn(2).double()
    assert_output(decode(case, DecodeState(case.bias, case.far, max_len=11)), case, 1e-8)


def test_a_wrong_table_is_noticed():
    case = make_case(17, causal=True, std=0.02, dtype=torch.float32)
    for wrong in (case.bias.flip(-1), case.bias.roll(1, -1), None):
        with pytest.raises(AssertionError, match='of the terms of its element'):
            assert_output(decode(case, DecodeState(wrong)), case, tolerance('step', torch.float32))


def test_a_short_decode_uses_the_centre_of_a_long_table():
    long, n = make_case(37, causal=True, std=2.0), 5
    assert_output(decode(long, DecodeState(long.bias), range(n)), long.prefix(n), 1e-8)


def test_two_states_do_not_share_anything():
    case, other = make_case(9, causal=True), make_case(9, causal=True, seed=1)
    other.bias = case.bias
    first, second = DecodeState(case.bias), DecodeState(case.bias)
    outputs = [
        (first.step(*(x[:, :, t] for x in (case.phi_q, case.phi_k, case.v))),
         second.step(*(x[:, :, t] for x in (other.phi_q, other.phi_k, other.v))))
        for t in range(9)
    ]  # fmt: skip
    for c, z in zip((case, other), zip(*outputs)):
        assert_output(torch.stack(z, 2), c, 1e-8)


def test_past_tokens_are_kept_by_value():
    """A caller may reuse its buffers for the next token."""
    case = make_case(9, causal=True)
    state, buffers, outputs = DecodeState(case.bias), [torch.empty_like(x[:, :, 0]) for x in (case.phi_q, case.v)], []
    key = torch.empty_like(buffers[0])
    for t in range(9):
        buffers[0].copy_(case.phi_q[:, :, t])
        key.copy_(case.phi_k[:, :, t])
        buffers[1].copy_(case.v[:, :, t])
        outputs.append(state.step(buffers[0], key, buffers[1]).clone())
    assert_output(torch.stack(outputs, 2), case, 1e-8)


def test_non_contiguous_tokens():
    case = make_case(9, causal=True)
    assert not case.v[:, :, 0].is_contiguous()
    assert_output(decode(case, DecodeState(case.bias)), case, 1e-8)


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('std', [None, 2.0])
def test_half_precision(std, half):
    case = make_case(300, causal=True, std=std, dtype=half)
    z = decode(case, DecodeState(case.bias))
    assert z.dtype == half
    # a running sum in half precision would stop growing after 256 tokens
    assert_output(z, case, 1.1 * torch.finfo(half).eps)


def test_without_a_bias_the_state_does_not_grow():
    case = make_case(40, causal=True, std=None, dtype=torch.float32)

    def size(state):
        return sum(t.untyped_storage().nbytes() for t in vars(state).values() if isinstance(t, torch.Tensor))

    state = DecodeState()
    decode(case, state, range(1))
    first = size(state)
    assert first > 0
    decode(case, state, range(1, 40))
    assert size(state) == first


def test_a_long_sum_does_not_drift():
    """Equal tokens make a float32 sum round the same way each time: 1.3e-3 after 70,000 of these."""
    token, v = torch.full((1, 1, 1), 1.1), torch.full((1, 1, 1), 0.37)
    state = DecodeState()
    for _ in range(20_000):
        z = state.step(token, token, v)
    torch.testing.assert_close(z, v, rtol=1e-5, atol=0)


def test_stepping_past_the_table():
    case = make_case(4, causal=True)
    state = DecodeState(case.bias)
    decode(case, state)
    with pytest.raises(ValueError, match='4'):
        decode(case, state, range(1))


def test_stepping_past_max_len():
    case = make_case(4, causal=True, std=None)
    state = DecodeState(max_len=3)
    decode(case, state, range(3))
    with pytest.raises(ValueError, match='3'):
        decode(case, state, range(1))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'phi_q': (2, 2, 5)}, r'\(2, 2, 5\)'),
        ({'phi_k': (2, 3, 6)}, r'\(2, 3, 6\)'),
        ({'v': (1, 2, 3)}, r'\(1, 2, 3\)'),
        ({'v': (2, 2, 1, 3)}, r'\(2, 2, 1, 3\)'),
        ({'phi_q': (2, 2, 1, 6), 'phi_k': (2, 2, 1, 6), 'v': (2, 2, 1, 3)}, r'\(2, 2, 1, 6\)'),
    ],
)
@pytest.mark.parametrize('std', [None, 0.5])
def test_bad_shapes(change, message, std):
    case = make_case(4, causal=True, std=std)
    state = DecodeState(case.bias)
    shapes = {'phi_q': (2, 2, 6), 'phi_k': (2, 2, 6), 'v': (2, 2, 3)} | change
    with pytest.raises(ValueError, match=message):
        state.step(**{name: torch.ones(shape).double() for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ('name', 'other', 'message'),
    [
        ('phi_k', {'dtype': torch.float32}, 'float32'),
        ('v', {'dtype': torch.float32}, 'float32'),
        ('v', {'dtype': torch.bfloat16}, 'bfloat16'),
        ('phi_q', {'device': 'meta'}, 'meta'),
        ('v', {'device': 'meta'}, 'meta'),
    ],
)
def test_mixed_dtypes_and_devices(name, other, message):
    token = {'phi_q': torch.ones(2, 2, 6), 'phi_k': torch.ones(2, 2, 6), 'v': torch.ones(2, 2, 3)}
    token = {key: x.double() for key, x in token.items()}
    with pytest.raises(ValueError, match=message):
        DecodeState().step(**token | {name: token[name].to(**other)})


@pytest.mark.parametrize('std', [None, 0.5])
def test_a_batch_that_changes_size(std):
    case, other = make_case(4, causal=True, std=std), make_case(4, causal=True, batch=3, std=std)
    state = DecodeState(case.bias)
    decode(case, state, range(1))
    with pytest.raises(ValueError, match=r'\(3, 2'):
        decode(other, state, range(1, 2))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'bias': torch.zeros(2, 6)}, r'\(2, 6\)'),
        ({'bias': torch.zeros(7)}, r'\(7,\)'),
        ({'bias': torch.zeros(2, 3, 3)}, r'\(2, 3, 3\)'),
        ({'bias': torch.zeros(2, 5), 'far': torch.zeros(3)}, r'\(3,\)'),
        ({'far': torch.zeros(2)}, 'far'),
        ({'max_len': 0}, '0'),
    ],
)
def test_bad_states(arguments, message):
    with pytest.raises(ValueError, match=message):
        DecodeState(**arguments)
