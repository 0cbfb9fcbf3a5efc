"""No program reads or writes outside its tensors, or depends on another; offsets are computed wide enough."""

import pytest
import torch

from nprf_vit.ops.attention import packed_attention
from nprf_vit.ops.bias import Bias
from nprf_vit.ops.dispatch import BACKENDS
from nprf_vit.ops.features import draw_projection

from .cases import make, run


def surrounded(x, margin=4096):
    """x inside larger memory full of NaN."""
    memory = torch.full((x.numel() + 2 * margin,), torch.nan, dtype=x.dtype)
    inner = memory[margin:-margin].view(x.shape)
    return inner.copy_(x)


CASES = {
    'grid': ({'grid': (3, 5)}, {'grid_size': (3, 5)}),
    'causal': ({'n': 19}, {'causal': True}),
    'window': ({'grid': (5, 4), 'window': (3, 3)}, {'grid_size': (5, 4)}),
    'none': ({'n': 19, 'std': None}, {}),
}


@pytest.mark.parametrize('name', CASES)
def test_memory_around_the_inputs_is_not_read(name):
    shape, options = CASES[name]
    tensors = make(**shape, m=5, d=9, batch=1)
    expected = run(tensors, **options)
    z, grads = run({name: surrounded(x) for name, x in tensors.items()}, **options)
    assert torch.equal(z, expected[0])
    for key, g in grads.items():
        assert torch.equal(g, expected[1][key])


@pytest.mark.parametrize('name', CASES)
def test_memory_around_the_outputs_is_not_written(name, monkeypatch):
    """Every tensor that the launch functions allocate lies between margins of NaN, which must stay."""
    shape, options = CASES[name]
    tensors = make(**shape, m=5, d=9, batch=1)
    expected = run(tensors, **options)
    guarded = []

    def guard(x):
        if x.numel() == 0:
            return x
        memory = torch.full((x.numel() + 2048,), torch.nan, dtype=x.dtype)
        guarded.append(memory)
        return memory[1024:-1024].as_strided(x.shape, x.stride(), 1024)

    originals = {f: getattr(torch, f) for f in ('empty', 'empty_like')}
    new_empty = torch.Tensor.new_empty
    for f, original in originals.items():
        monkeypatch.setattr(torch, f, lambda *a, original=original, **k: guard(original(*a, **k)))
    monkeypatch.setattr(torch.Tensor, 'new_empty', lambda *a, **k: guard(new_empty(*a, **k)))
    z, grads = run(tensors, **options)
    assert len(guarded) >= 10
    for memory in guarded:
        assert memory[:1024].isnan().all() and memory[-1024:].isnan().all()
    assert torch.equal(z, expected[0])
    for key, g in grads.items():
        assert torch.equal(g, expected[1][key])


@pytest.mark.parametrize('name', CASES)
def test_programs_in_any_order(name, monkeypatch):
    from triton.runtime.interpreter import interpreter_builder

    shape, options = CASES[name]
    tensors = make(**shape)
    expected = run(tensors, **options)
    set_index, set_size, order, seen = interpreter_builder.set_grid_idx, interpreter_builder.set_grid_dim, {}, []
    generator = torch.Generator().manual_seed(0)

    def shuffle(nx, ny, nz):
        order['x'] = torch.randperm(nx, generator=generator).tolist()
        seen.append(nx)
        set_size(nx, ny, nz)

    monkeypatch.setattr(interpreter_builder, 'set_grid_dim', shuffle)
    monkeypatch.setattr(interpreter_builder, 'set_grid_idx', lambda x, y, z: set_index(order['x'][x], y, z))
    z, grads = run(tensors, **options)
    assert max(seen) > 3
    assert torch.equal(z, expected[0])
    for key, g in grads.items():
        assert torch.equal(g, expected[1][key])


def test_packed_projection_by_strides():
    """The third of a larger memory, tokens apart: the same bits as from a compact copy, gradients too."""
    memory = torch.full((2, 12, 3, 3, 2, 16), torch.nan)
    qkv = memory[:, :, 1]  # B, N, 3, K, D
    qkv.copy_(torch.randn(qkv.shape, generator=torch.Generator().manual_seed(0)))
    w, bias = draw_projection(2, 8, 16), torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    results = []
    for x in (qkv, qkv.contiguous()):
        leaf, table = x.detach().requires_grad_(), bias.clone().requires_grad_()
        z = packed_attention(BACKENDS['fused'].run, leaf, w, Bias(table), grid_size=(3, 4))
        results.append((z, *torch.autograd.grad(z.square().sum(), (leaf, table))))
    for a, b in zip(*results):
        assert torch.equal(a, b) and a.isfinite().all()
