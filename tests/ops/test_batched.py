"""The plain path off the CPU: against the oracle here, and on fake CUDA tensors for what it must not do."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from nprf_vit.ops import reference
from nprf_vit.ops.backends import batched, direct
from nprf_vit.ops.backends.interface import Inputs
from nprf_vit.ops.bias import Bias

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


@pytest.mark.parametrize('causal', [False, True])
def test_nothing_is_read_on_the_host(causal):
    with FakeTensorMode():
        phi_q, phi_k = (torch.empty(2, 3, 20, 8, device='cuda') for _ in range(2))
        v, bias, far = (torch.empty(s, device='cuda') for s in ((2, 3, 20, 4), (3, 1, 39), (3,)))
        for table, beyond in ((None, None), (bias, None), (bias[:, :, 15:24], far)):
            inputs = phi_q, phi_k, v, table, beyond
            z, den = batched.attend(*inputs, (1, 20), causal, True)
            batched.attend_backward(*inputs, z, den, v, (1, 20), causal, True)
        with pytest.raises(DataDependentOutputException):  # what the CPU's path does
            direct.forward(Inputs(phi_q, phi_k, v, Bias(bias)), (1, 20), causal, torch.float32)
