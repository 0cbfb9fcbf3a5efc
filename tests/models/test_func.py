"""`torch.func` through whole models: gradients per sample, ensembles, tangents, second derivatives."""

import pytest
import timm
import torch
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

from .small import SMALL, make

VARIANTS = [
    {},
    {'rel_pos': 'layer'},
    {'rel_pos': 'none'},
    {'kernel': 'softmax'},
    {'kernel': 'trf', 'normalize': False},
    {'kernel': 'elu'},
    {'rel_pos_extend': 'cells', 'rel_pos_size': (2, 2)},
    {'rel_pos_extend': 'extend', 'rel_pos_size': (2, 2)},
    {'class_token': True, 'reg_tokens': 1},
]


def double(**kwargs):
    return make(depth=1, **kwargs).double()


def images(batch=3):
    return torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def loss_of(model):
    buffers = dict(model.named_buffers())

    def loss(parameters, image, **kwargs):
        return functional_call(model, (parameters, buffers), (image[None],), kwargs).square().sum()

    return loss


def looped(model, x, **kwargs):
    """Gradients of each item by itself, by autograd."""
    found = []
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1], **{k: v[i : i + 1] for k, v in kwargs.items()}).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return {name: torch.stack([g[name] for g in found]) for name in found[0]}


@pytest.mark.parametrize('kwargs', VARIANTS, ids=str)
def test_gradients_per_sample(kwargs):
    model, x = double(**kwargs), images()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    actual = vmap(grad(loss_of(model)), (None, 0))(parameters, x)
    expected = looped(model, x)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-8, atol=1e-10, msg=name)
    assert any(name.endswith('table') for name in expected) or kwargs.get('rel_pos') == 'none'


def test_gradients_per_sample_with_padding():
    model, x = double(), images()
    mask = torch.ones(3, 4, 4, dtype=torch.bool)
    mask[0, 2:], mask[1, :, 3] = False, False
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    loss = loss_of(model)
    added = torch.zeros(3, 1, 1, 16, dtype=torch.float64).masked_fill(~mask.reshape(3, 1, 1, 16), -torch.inf)
    actual = vmap(grad(lambda p, i, m: loss(p, i, attn_mask=m[None])), (None, 0, 0))(parameters, x, mask)
    again = vmap(grad(lambda p, i, m: loss(p, i, attn_mask=m[None])), (None, 0, 0))(parameters, x, added)
    expected = looped(model, x, attn_mask=mask)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-8, atol=1e-10, msg=name)
        assert torch.equal(again[name], actual[name]), name


def test_an_ensemble():
    models, x = [double() for _ in range(3)], images()
    parameters, buffers = stack_module_state(models)
    skeleton = double().to('meta')
    out = vmap(lambda p, b: functional_call(skeleton, (p, b), (x,)))(parameters, buffers)
    for model, z in zip(models, out):
        torch.testing.assert_close(z, model(x), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize('kwargs', VARIANTS[:3], ids=str)
def test_tangents_and_a_gradient_penalty(kwargs):
    model, x = double(**kwargs), images(1)
    direction = torch.randn_like(x)
    tangent = jvp(model, (x,), (direction,))[1]
    step = 1e-5
    with torch.no_grad():
        difference = (model(x + step * direction) - model(x - step * direction)) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-7)

    def penalty(image):
        image = image.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(image).sum(), image, create_graph=True)
        return slope.square().sum()

    model.zero_grad()
    penalty(x).backward()
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith(('table', 'attn.qkv.weight')))
    (index,) = (parameter.grad.abs() == parameter.grad.abs().max()).nonzero()[:1].tolist()
    value = parameter.grad[tuple(index)].item()
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter[tuple(index)] += sign * step
        ends.append(penalty(x).item())
        with torch.no_grad():
            parameter[tuple(index)] -= sign * step
    assert value == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4), name


def test_pixel_model():
    kwargs = {'img_size': 3, 'embed_dim': 16, 'depth': 1, 'num_heads': 2, 'feature_dim': 4}
    model = timm.create_model('nprf_pixel_imagenet32', **kwargs).double().eval()
    x = torch.randint(0, 256, (2, 3, 3, 3))  # int64, whose range is looked at where values are
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    actual = vmap(grad(loss_of(model)), (None, 0))(parameters, x)
    expected = looped(model, x)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-8, atol=1e-10, msg=name)


def test_training_mode_needs_what_torch_needs():
    """Dropout under vmap asks for a kind of randomness, as in every model; ours adds nothing to it."""
    model = timm.create_model('nprf_deit_tiny', proj_drop_rate=0.1, **SMALL).double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(grad(loss_of(model)), (None, 0), randomness='different')(parameters, images())
    assert all(g.isfinite().all() for g in found.values())
