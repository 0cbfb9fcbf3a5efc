"""captum: attributions of pixels and of a block's tokens."""

import pytest
import torch

from .small import batch, make

attr = pytest.importorskip('captum.attr')
pytestmark = pytest.mark.slow


def test_integrated_gradients_are_complete():
    model, (x, y) = make(), batch(2)
    integrated, delta = attr.IntegratedGradients(model).attribute(
        x, target=y, n_steps=64, internal_batch_size=16, return_convergence_delta=True
    )
    with torch.no_grad():
        gap = (model(x) - model(torch.zeros_like(x))).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(integrated.flatten(1).sum(1).float(), gap, rtol=0.02, atol=0.01)
    assert delta.abs().max() < 0.01


def test_layers():
    model, (x, y) = make(), batch(2)
    saliency = attr.Saliency(model).attribute(x.clone().requires_grad_(), target=y)
    assert saliency.shape == x.shape and saliency.isfinite().all()
    tokens = attr.LayerActivation(model, model.blocks[1]).attribute(x)
    assert tokens.shape == (2, 4, 4, 32)
    layer = attr.LayerIntegratedGradients(model, model.blocks[0].attn).attribute(x, target=y, n_steps=8)
    assert layer.shape == (2, 4, 4, 32) and layer.isfinite().all()
