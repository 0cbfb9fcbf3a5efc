"""The plain path off the CPU: against the oracle here, and on fake CUDA tensors for what it must not do."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from nprf_vit.ops import reference
from nprf_vit.ops.backends import batched, batched_tiles, direct
from nprf_vit.ops.backends.interface import Inputs
from nprf_vit.ops.bias import Bias
from tests.fake_cuda import needs_fake_cuda

from .compare import make_case


@pytest.mark.parametrize('scratch', [512 << 20, 20_000, 3_000])
@pytest.mark.parametrize(
    'shape', [{'grid_size': (3, 5)}, {'grid_size': (1, 1)}, {'n': 9}, {'n': 9, 'causal': True}, {'n': 7, 'std': None}]
)
def test_equals_the_oracle(shape, scratch, monkeypatch):
    """Whole batches, single heads, and a few rows at a time."""
    monkeypatch.setattr(batched, 'SCRATCH', scratch)
    case = make_case(**shape, heads=4)
    check(case)


def test_window(monkeypatch):
    monkeypatch.setattr(batched, 'SCRATCH', 3_000)
    case = make_case(grid_size=(4, 5))
    case.bias, case.far = case.bias[:, 2:5, 3:6], torch.randn(2, dtype=torch.float64)
    check(case)


WINDOWS = {
    'grid': ({'grid_size': (9, 11)}, (3, 3)),
    'tall': ({'grid_size': (17, 4)}, (3, 5)),
    'wide': ({'grid_size': (4, 17)}, (5, 3)),
    'one offset': ({'grid_size': (11, 10)}, (1, 1)),
    'larger than the grid in one direction': ({'grid_size': (3, 19)}, (9, 3)),
    'sequence': ({'n': 23}, (5,)),
    'causal': ({'n': 23, 'causal': True}, (5,)),
    'causal, whole tiles': ({'n': 16, 'causal': True}, (3,)),
}


@pytest.mark.parametrize('scratch', [512 << 20, 3_000])
@pytest.mark.parametrize('name', WINDOWS)
def test_window_by_tiles(name, scratch, monkeypatch):
    """Tiles of at least 2 tokens a side: whole batches at once, and single heads."""
    monkeypatch.setattr(batched, 'SCRATCH', scratch)
    monkeypatch.setattr(batched_tiles, '_SIDE', 2)
    monkeypatch.setattr(batched_tiles, '_SEQUENCE_SIDE', 2)
    case, plan = windowed(*WINDOWS[name])
    assert plan is not None
    check(case)


def windowed(shape, window, std=0.5, far=None):
    """A case whose bias is a window of its own, and the tiles it is cut into."""
    case = make_case(**shape, heads=4, std=std)
    generator = torch.Generator().manual_seed(5)
    case.bias = std * torch.randn(4, *window, generator=generator, dtype=torch.float64)
    case.far = torch.full((4,), far) if far is not None else std * torch.randn(4, generator=generator)
    case.far = case.far.double()
    table = case.bias.reshape(4, -1, case.bias.shape[-1])
    return case, batched_tiles.plan(table, case.grid_size or (1, case.v.shape[2]), case.causal)


@pytest.mark.parametrize('far', [-40.0, 40.0])
def test_a_far_constant_that_drowns_the_window_or_drowns_in_it(far, monkeypatch):
    """In float32: `window` subtracts and must hand such a bias on, tiles have nothing to subtract."""
    monkeypatch.setattr(batched_tiles, '_SIDE', 2)
    case, plan = windowed({'grid_size': (9, 10)}, (3, 3), far=far)
    assert plan is not None
    single = case.map(torch.Tensor.float)
    z, _ = batched.attend(single.phi_q, single.phi_k, single.v, single.bias, single.far, (9, 10), False, True)
    weights = case.map(lambda x: x.float().double()).weights()
    assert ((z.double() - weights @ case.v).abs() / (weights @ case.v.abs())).max() < 1e-5


def test_a_window_nearly_as_large_as_its_grid_is_a_dense_product():
    _, plan = windowed({'grid_size': (14, 14)}, (27, 27))
    assert plan is None
    _, plan = windowed({'grid_size': (32, 32)}, (27, 27))
    assert plan is None
    _, plan = windowed({'grid_size': (64, 64)}, (27, 27))
    assert plan.tile == (13, 13) and plan.pairs() < 64**4


def test_the_bias_gradient_is_the_same_on_every_run(monkeypatch):
    monkeypatch.setattr(batched_tiles, '_SIDE', 2)
    case, _ = windowed({'grid_size': (9, 11)}, (3, 3))
    inputs = case.phi_q, case.phi_k, case.v, case.bias, case.far
    z, den = batched.attend(*inputs, (9, 11), False, True)
    runs = [batched.attend_backward(*inputs, z, den, torch.ones_like(z), (9, 11), False, True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def check(case):
    leaves = case.map(lambda x: x.clone().requires_grad_())
    z = reference.attention(**leaves.arguments())
    grad = torch.randn_like(z)
    names = list(leaves.tensors())
    exact = dict(zip(names, torch.autograd.grad(z, list(leaves.tensors().values()), grad)))
    grid = case.grid_size or (1, case.v.shape[2])
    bias = None if case.bias is None else case.bias.reshape(case.bias.shape[0], -1, case.bias.shape[-1])
    inputs = case.phi_q, case.phi_k, case.v, bias, case.far
    mine, den = batched.attend(*inputs, grid, case.causal, True)
    torch.testing.assert_close(mine, z.detach(), rtol=1e-10, atol=1e-12)
    grads = batched.attend_backward(*inputs, mine, den, grad, grid, case.causal, bias is not None)
    for name, g in zip(('phi_q', 'phi_k', 'v', 'bias', 'far'), grads):
        assert (g is None) == (name not in exact)
        if g is not None:
            torch.testing.assert_close(g.reshape(exact[name].shape), exact[name], rtol=1e-9, atol=1e-11)


def test_wide_bias_in_float32():
    """A spread of 120: one scale per head holds it."""
    case = make_case(grid_size=(5, 6), std=20.0)
    single = case.map(torch.Tensor.float)
    z, _ = batched.attend(single.phi_q, single.phi_k, single.v, single.bias, None, (5, 6), False, True)
    weights = case.weights()
    assert ((z.double() - weights @ case.v).abs() / (weights @ case.v.abs())).max() < 1e-4


@needs_fake_cuda
@pytest.mark.parametrize('causal', [False, True])
def test_nothing_is_read_on_the_host(causal, monkeypatch):
    with FakeTensorMode():
        phi_q, phi_k = (torch.empty(2, 3, 20, 8, device='cuda') for _ in range(2))
        v, bias, far = (torch.empty(s, device='cuda') for s in ((2, 3, 20, 4), (3, 1, 39), (3,)))
        monkeypatch.setattr(batched_tiles, '_SEQUENCE_SIDE', 4)
        assert batched_tiles.plan(bias[:, :, 15:24], (1, 20), causal) is not None
        for table, beyond in ((None, None), (bias, None), (bias[:, :, 15:24], far)):
            inputs = phi_q, phi_k, v, table, beyond
            z, den = batched.attend(*inputs, (1, 20), causal, True)
            batched.attend_backward(*inputs, z, den, v, (1, 20), causal, True)
        with pytest.raises(DataDependentOutputException):  # what the CPU's path does
            direct.forward(Inputs(phi_q, phi_k, v, Bias(bias)), (1, 20), causal, torch.float32)
