"""A layer with tokens before its grid, against the equations in float64."""

import pytest
import torch

from nprf_vit.layers import KernelAttention, PrefixRelPosBias
from nprf_vit.layers.attention import unit_norm
from nprf_vit.ops import reference
from nprf_vit.ops.bias import PrefixedBias

P, GRID, DIM, HEADS = 3, (4, 5), 12, 2


def make(kernel='prf', normalize=True, extend='interpolate', **kwargs) -> KernelAttention:
    torch.manual_seed(0)
    options = {'rel_pos_size': GRID, 'rel_pos_extend': extend, 'num_prefix_tokens': P, 'feature_dim': 6, **kwargs}
    layer = KernelAttention(DIM, HEADS, kernel, normalize, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.rel_pos_bias.parameters():
            parameter.normal_()
    return layer


def matrix(bias: PrefixRelPosBias, grid) -> torch.Tensor:
    """(K, P+N, P+N) by the oracle's lookups, from a table of that grid."""
    n = grid[0] * grid[1]
    return reference.prefixed_bias(
        reference.dense_bias(bias.whole_table(grid), n, grid),
        bias.token_to_prefix,
        bias.prefix_to_token,
        bias.prefix_to_prefix,
    )


def equations(layer: KernelAttention, x: torch.Tensor, grid=GRID) -> torch.Tensor:
    q, k, v = layer.project(x)
    q, k = (unit_norm(q), unit_norm(k)) if layer.normalize else (x * layer.head_dim**-0.25 for x in (q, k))
    b = matrix(layer.rel_pos_bias, grid)
    if layer.kernel == 'softmax':
        a = (q @ k.mT + b).softmax(-1)
    else:
        w = None if layer.w is None else layer.w.double()
        a = reference.matrix_attention_weights(*(reference.features(y, w, layer.kernel) for y in (q, k)), b)
    return layer.proj((a @ v).transpose(1, 2).flatten(2))


def tokens(n=20) -> torch.Tensor:
    return torch.randn(2, P + n, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('kernel', ['prf', 'elu', 'softmax'])
def test_output_and_every_gradient(kernel, normalize):
    layer, x = make(kernel, normalize), tokens().requires_grad_()
    leaves = [x, *layer.parameters()]
    z, expected = layer(x), equations(layer, x)
    torch.testing.assert_close(z, expected)
    cotangent = torch.randn_like(z)
    # 1e-300 and less in the unnormalized kernels' features are floored (docs/math.md)
    for g, e in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (z, expected))):
        torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize('part', ['token_to_prefix', 'prefix_to_token', 'prefix_to_prefix', 'table'])
def test_a_changed_bias_changes_the_output(part):
    layer, x = make(), tokens()
    expected = equations(layer, x)
    with torch.no_grad():
        getattr(layer.rel_pos_bias, part).view(-1)[0] += 0.5
    assert not torch.allclose(layer(x), expected, rtol=1e-4)


@pytest.mark.parametrize('kernel', ['prf', 'softmax'])
@pytest.mark.parametrize('extend', ['interpolate', 'extend'])
def test_other_grids(extend, kernel):
    layer, grid = make(kernel, extend=extend), (7, 6)
    torch.testing.assert_close(layer(tokens(42), grid_size=grid), equations(layer, tokens(42), grid))


def test_cells_agree_with_the_dense_matrix():
    layer, dense = make(extend='cells'), make('softmax', extend='cells').rel_pos_bias
    grid, x = (8, 10), tokens(80)
    b = dense(grid).matrix
    q, k, v = layer.project(x)
    a = reference.matrix_attention_weights(*(reference.features(unit_norm(y), layer.w.double()) for y in (q, k)), b)
    torch.testing.assert_close(layer(x, grid_size=grid), layer.proj((a @ v).transpose(1, 2).flatten(2)))


def test_the_softmax_matrix_is_the_oracles():
    bias = make('softmax').rel_pos_bias
    torch.testing.assert_close(bias(GRID).matrix, matrix(bias, GRID))


def test_a_bias_shared_between_layers():
    own, bias = make(), make().rel_pos_bias
    shared = make()
    shared.rel_pos_bias = None
    given = bias(GRID)
    assert isinstance(given, PrefixedBias) and given.grid_size == GRID
    assert torch.equal(shared(tokens(), given), own(tokens()))


def test_along_a_sequence():
    layer = make(rel_pos_size=(20,))
    bias = layer.rel_pos_bias
    b = reference.prefixed_bias(
        reference.dense_bias(bias.table, 20), bias.token_to_prefix, bias.prefix_to_token, bias.prefix_to_prefix
    )
    q, k, v = layer.project(tokens())
    a = reference.matrix_attention_weights(*(reference.features(unit_norm(y), layer.w.double()) for y in (q, k)), b)
    torch.testing.assert_close(layer(tokens()), layer.proj((a @ v).transpose(1, 2).flatten(2)))


def test_errors():
    layer = make()
    with pytest.raises(ValueError, match=r'expected \(B, 3\+N, C\), 3 tokens before those of the grid, got'):
        layer(torch.randn(2, 4, 5, DIM, dtype=torch.float64))
    with pytest.raises(ValueError, match='21 tokens do not fill the 4x5 grid of the bias: pass grid_size'):
        layer(tokens(21))
    with pytest.raises(ValueError, match='holds 20 tokens, phi_q and v have 21'):
        layer(tokens(21), grid_size=GRID)
    with pytest.raises(ValueError, match='tokens before a grid have no order'):
        layer(tokens(), is_causal=True)
    with pytest.raises(ValueError, match='num_prefix_tokens 0: expected at least 1'):
        PrefixRelPosBias(GRID, HEADS, num_prefix_tokens=0)
