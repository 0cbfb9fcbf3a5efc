"""Empty batches, tensors without values, and graphs that meet another size than they were recorded at."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nprf_vit.ops import DecodeState, feature_map, kernel_attention
from nprf_vit.ops.backends import batched  # noqa: F401  registers the ops

from .compare import make_case
from .test_key_mask import PAIRS, case_of


@pytest.mark.parametrize('backend, kind', PAIRS)
def test_an_empty_batch(backend, kind):
    case = case_of(kind, torch.float32)
    leaves = {name: (x[:0] if x.dim() == 4 else x).clone().requires_grad_() for name, x in case.tensors().items()}
    arguments = case.arguments() | leaves
    for mask in (None, torch.ones(0, 35, dtype=torch.bool)):
        z = kernel_attention(**arguments, backend=backend, key_mask=mask)
        assert z.shape == (0, *case.v.shape[1:])
        for name, g in zip(leaves, torch.autograd.grad(z.sum(), list(leaves.values()))):
            assert g.shape == leaves[name].shape and (g == 0).all()


def test_an_empty_batch_token_by_token():
    phi, v = torch.ones(0, 2, 5, 4), torch.ones(0, 2, 5, 3)
    assert kernel_attention(phi, phi, v, torch.zeros(2, 9), causal=True, backend='step').shape == v.shape
    state = DecodeState(torch.zeros(2, 9))
    assert state.step(phi[:, :, 0], phi[:, :, 0], v[:, :, 0]).shape == (0, 2, 3)


def test_an_empty_batch_across():
    phi_q, phi_k, v = torch.ones(0, 2, 5, 4), torch.ones(0, 2, 7, 4), torch.ones(0, 2, 7, 3)
    assert kernel_attention(phi_q, phi_k, v).shape == (0, 2, 5, 3)


@pytest.mark.parametrize('kind', ['prf', 'trf', 'elu'])
@pytest.mark.parametrize('role', ['query', 'key'])
def test_features_of_an_empty_batch(kind, role):
    x, w = torch.ones(0, 2, 5, 4), torch.ones(2, 6, 4)
    for normalize in (True, False):
        assert feature_map(x, w, kind, role, normalize=normalize).shape[:3] == (0, 2, 5)
    assert feature_map(x, w, kind, key_mask=torch.ones(0, 5, dtype=torch.bool)).shape[:3] == (0, 2, 5)


def test_no_tokens_are_still_an_error():
    with pytest.raises(ValueError, match='every dimension but the batch'):
        kernel_attention(torch.ones(1, 2, 0, 4), torch.ones(1, 2, 0, 4), torch.ones(1, 2, 0, 4))


@pytest.mark.filterwarnings('ignore')
def test_a_traced_call_at_another_size_says_so():
    case = make_case(grid_size=(3, 4), dtype=torch.float32)

    def call(q, k, v):
        return kernel_attention(q, k, v, case.bias, grid_size=(3, 4))

    inputs = case.phi_q, case.phi_k, case.v
    traced = torch.jit.trace(call, inputs)
    torch.testing.assert_close(traced(*inputs), call(*inputs))
    with pytest.raises(Exception, match='10 queries and 10 keys for a 3x4 grid'):
        traced(*(x[:, :, :10] for x in inputs))


def test_the_raw_op_checks_its_tokens():
    phi, v = torch.ones(1, 2, 6, 4), torch.ones(1, 2, 6, 3)
    options = False, True, 'auto'
    torch.ops.nprf_vit.attend(phi, phi, v, None, None, 2, 3, *options)
    torch.ops.nprf_vit.attend(phi[:, :, :2], phi, v, None, None, 1, 2, *options)
    with pytest.raises(ValueError, match='6 queries and 6 keys for a 2x4 grid: expected 8'):
        torch.ops.nprf_vit.attend(phi, phi, v, None, None, 2, 4, *options)
    bias = torch.zeros(2, 1, 3)
    with pytest.raises(ValueError, match='2 queries and 6 keys for a 1x2 grid'):
        torch.ops.nprf_vit.attend(phi[:, :, :2], phi, v, bias, None, 1, 2, *options)
    with pytest.raises(ValueError, match='2 queries and 6 keys'):
        torch.ops.nprf_vit.attend(phi[:, :, :2], phi, v, None, None, 1, 2, True, True, 'auto')


@pytest.mark.parametrize('positive', [True, False])
@pytest.mark.parametrize('has_bias', [True, False])
def test_decoding_without_values(has_bias, positive):
    with FakeTensorMode():
        state = DecodeState(torch.zeros(2, 9) if has_bias else None, positive=positive)
        for _ in range(3):
            z = state.step(torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 3))
        assert z.shape == (1, 2, 3)


def test_decoding_without_values_takes_the_way_of_logarithms_which_is_right(monkeypatch):
    """What stands in where nobody can look gives the same numbers."""
    case = make_case(9, causal=True, dtype=torch.float64)
    expected = case.run('direct')
    monkeypatch.setattr('nprf_vit.ops.decode.has_values', lambda x: False)
    torch.testing.assert_close(case.run('step'), expected)
