"""`RelPosBias` on sequences longer and shorter than its table, causal and not, against the oracle."""

import pytest
import torch

from nprf_vit.layers import KernelAttention, RelPosBias
from nprf_vit.layers.cached_attention import AttentionStep
from nprf_vit.layers.rel_pos import clip_table
from nprf_vit.ops import choose_backend, reference

TABLE = 6


def layer(extend, causal, kernel='prf', seed=0, **options):
    torch.manual_seed(seed)
    size = {'rel_pos_size': (TABLE,), 'rel_pos_extend': extend}
    attn = KernelAttention(16, 2, kernel, causal=causal, feature_dim=8, **size, **options).double()
    torch.nn.init.normal_(attn.rel_pos_bias.table)
    if attn.rel_pos_bias.far is not None:
        torch.nn.init.normal_(attn.rel_pos_bias.far)
    return attn


def matrix(bias, n):
    """b_{j-i} (K, N, N) one pair at a time, from the definitions."""
    table, radius = bias.table, bias.table.shape[1] // 2
    if bias.extend == 'interpolate':
        stretched = torch.nn.functional.interpolate(table[None], size=2 * n - 1, mode='linear')[0]
        return torch.stack([torch.stack([stretched[:, j - i + n - 1] for j in range(n)], -1) for i in range(n)], 1)
    rows = []
    for i in range(n):
        row = []
        for offset in range(-i, n - i):
            if bias.extend == 'clip':
                row.append(table[:, min(max(offset, -radius), radius) + radius])
            else:
                row.append(table[:, offset + radius] if abs(offset) <= radius else bias.beyond())
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, 1)


@pytest.mark.parametrize('extend', ['interpolate', 'extend', 'clip'])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('n', [1, 3, TABLE, 7, 25, 150])
@pytest.mark.parametrize('kernel', ['prf', 'softmax'])
def test_longer_and_shorter_than_the_table(extend, causal, n, kernel):
    attn = layer(extend, causal, kernel)
    x = torch.randn(2, n, 16, dtype=torch.double)
    out = attn(x)
    b = matrix(attn.rel_pos_bias, n)
    q, k, v = attn.project(x)
    future = torch.ones(n, n, dtype=torch.bool).triu(1) if causal else torch.zeros(n, n, dtype=torch.bool)
    b = b.masked_fill(future, -torch.inf)
    unit = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    if kernel == 'softmax':
        weights = (unit[0] @ unit[1].transpose(-1, -2) + b).softmax(-1)
    else:
        phi_q, phi_k = (reference.features(y, attn.w.double()) for y in unit)
        weights = (phi_q @ phi_k.transpose(-1, -2)) * b.exp()
        weights = weights / weights.sum(-1, keepdim=True)
    expected = attn.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-10)
    parameters = list(attn.rel_pos_bias.parameters())
    grads = [torch.autograd.grad(y.square().sum(), parameters, allow_unused=True) for y in (out, expected)]
    for a, g in zip(*grads):
        torch.testing.assert_close(a, torch.zeros_like(a) if g is None else g, rtol=1e-6, atol=1e-9)


def test_the_ends_differ_by_side():
    """A table that is not symmetric: what lies before takes the first entry, what lies behind the last."""
    bias = RelPosBias((2,), 1, extend='clip')
    with torch.no_grad():
        bias.table.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    assert bias.whole_table((4,)).tolist() == [[1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0]]
    assert bias.whole_table((1,)).tolist() == [[2.0]]
    assert bias((4,)).far is None and bias((4,), causal=True).far.tolist() == [1.0]


def test_clipped_and_causal_is_linear_in_the_length():
    bias = RelPosBias((64,), 2, extend='clip')((20_000,), causal=True)
    radius = bias.table.shape[1] // 2
    assert choose_backend((1, 20_000), 32, 64, True, True, (0, radius)) == 'window'


@pytest.mark.parametrize('grid_size', [(2, 2), (5, 4), (1, 7), (3, 9)])
def test_clip_on_a_grid_is_along_each_axis(grid_size):
    table = torch.randn(2, 5, 7, requires_grad=True)  # 3x4
    out = clip_table(table, grid_size)
    rows, cols = ((torch.arange(2 * s - 1) - s + 1).clamp(-r, r) + r for s, r in zip(grid_size, (2, 3)))
    expected = table[:, rows][:, :, cols]
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    grads = [torch.autograd.grad((y * weight).sum(), table)[0] for y in (out, expected)]
    torch.testing.assert_close(*grads)


def test_clip_keeps_the_table_as_learned():
    source, bias = RelPosBias((9,), 2), RelPosBias((4,), 2, extend='clip')
    bias.load_state_dict(source.state_dict())
    assert bias.grid_size == (9,) and torch.equal(bias.table, source.table)
    bias.set_grid_size((30,))
    assert bias.grid_size == (9,) and torch.equal(bias.table, source.table)
    assert torch.equal(bias().table, bias.table)


def test_dynamic_lengths_export_as_a_gather():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = RelPosBias((4,), 2, extend='clip')

        def forward(self, x):
            return self.bias.whole_table((x.shape[0],))

    model = Model()
    program = torch.export.export(model, (torch.zeros(7),), dynamic_shapes=({0: torch.export.Dim('n', min=2, max=99)},))
    for n in (2, 4, 30):
        assert torch.equal(program.module()(torch.zeros(n)), model(torch.zeros(n)))


@pytest.mark.parametrize('extend', ['extend', 'clip'])
@pytest.mark.parametrize('kernel', ['prf', 'softmax'])
def test_generation_beyond_the_table(extend, kernel):
    attn = layer(extend, True, kernel)
    x = torch.randn(2, 15, 16, dtype=torch.double)
    with torch.no_grad():
        step = AttentionStep(attn, None, max_len=15)
        out = torch.stack([step(x[:, t]) for t in range(15)], 1)
        torch.testing.assert_close(out, attn(x))
