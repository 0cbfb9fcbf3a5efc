"""Opacus: per-sample gradients by its hooks where parameters see a batch, by `torch.func` for the bias."""

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from .small import batch, make

opacus = pytest.importorskip('opacus')
pytestmark = pytest.mark.slow


def by_item(model, x, y):
    found = []
    for i in range(len(x)):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
    return {name: torch.stack([g[name] for g in found]) for name in found[0]}


def test_hooks_without_the_bias():
    """A table is no function of the batch: frozen, all other gradients are those of Opacus's hooks."""
    model, (x, y) = make().train(), batch(3)
    for module in model.bias_modules().values():
        module.requires_grad_(False)
    expected = by_item(model, x, y)
    model.zero_grad()
    wrapped = opacus.GradSampleModule(model, loss_reduction='sum')
    torch.nn.functional.cross_entropy(wrapped(x), y, reduction='sum').backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad_sample, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_private_training_with_the_bias():
    """Gradients per sample by `torch.func`, clipping and noise by Opacus."""
    model, (x, y) = make().train(), batch(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    engine = opacus.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, grad_sample_mode='no_op',
    )  # fmt: skip
    inner = model._module if hasattr(model, '_module') else model
    before = {name: p.detach().clone() for name, p in inner.named_parameters()}
    buffers = dict(inner.named_buffers())

    def loss(parameters, image, label):
        logits = functional_call(inner, (parameters, buffers), (image[None],))
        return torch.nn.functional.cross_entropy(logits, label[None])

    for images, labels in loader:
        optimizer.zero_grad()
        parameters = {name: p.detach() for name, p in inner.named_parameters()}
        for name, g in vmap(grad(loss), (None, 0, 0))(parameters, images, labels).items():
            inner.get_parameter(name).grad_sample = g
        optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in inner.named_parameters())
    assert engine.get_epsilon(delta=1e-5) > 0
