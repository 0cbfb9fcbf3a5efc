"""The fused op against the oracle: biases on grids and sequences, causal, none, windows; sizes around tile edges."""

import pytest
import torch

from .cases import assert_right, make, run


@pytest.mark.parametrize('grid', [(1, 1), (1, 5), (3, 2), (5, 3)])
def test_grids(grid):
    assert_right(make(grid), grid_size=grid)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('n', [1, 37])
def test_sequences(n, causal):
    assert_right(make(n=n), causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('n', [15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129])
def test_sizes_around_tile_edges(n, causal):
    """Tiles hold 16, 32 or 64 tokens, diagonals of the bias gradient 16 or 32."""
    assert_right(make(n=n, batch=1), causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize('grid', [(5, 7), (7, 14), (2, 33), (33, 2), (4, 17), (13, 11), (8, 16), (9, 15)])
def test_larger_grids(grid):
    assert_right(make(grid, batch=1), grid_size=grid)
    assert_right(make(grid, batch=1, window=(5, 3)), grid_size=grid)


@pytest.mark.parametrize('causal', [False, True])
def test_without_a_bias(causal):
    assert_right(make(n=37, std=None), causal=causal)


@pytest.mark.parametrize('window', [(3, 5), (9, 9), (7, 21)])
def test_windows(window):
    """Smaller than the grid, exactly its table, and larger than it in one direction."""
    grid = (5, 5)
    tensors = make(grid, window=window, batch=1)
    z, grads = run(tensors, grid_size=grid)
    assert_right(tensors, result=(z, grads), grid_size=grid)
    if window == (9, 9):
        assert (grads['far'] == 0).all()


def test_nothing_beyond_a_window_larger_than_the_grid():
    _, grads = run(make((2, 3), window=(9, 9), batch=1), grid_size=(2, 3))
    assert (grads['far'] == 0).all()


@pytest.mark.parametrize('causal', [False, True])
def test_window_of_a_sequence(causal):
    assert_right(make(n=70, window=(7,), batch=1), causal=causal)


def test_window_that_masks():
    tensors = make((5, 5), window=(3, 3), far=-torch.inf, batch=1)
    z, grads = run(tensors, grid_size=(5, 5))
    assert (grads['far'] == 0).all()
    tensors['far'].fill_(-200.0)  # the oracle's gradient of -inf is a NaN
    assert_right(tensors, result=(z, grads), grid_size=(5, 5))


@pytest.mark.parametrize('std', [pytest.param(40.0, marks=pytest.mark.slow), 100.0])
def test_wide_biases(std):
    """Each row scaled by itself, through logarithms."""
    assert_right(make((5, 4), std=std, batch=1), output=2e-5, gradient=5e-4, grid_size=(5, 4))
    assert_right(make(n=20, std=std, batch=1), output=2e-5, gradient=5e-4, causal=True)


def test_wide_window():
    assert_right(make((5, 6), std=30.0, window=(3, 3), batch=1), output=2e-5, gradient=5e-4, grid_size=(5, 6))


def test_denominators_that_underflow():
    """Scores of 1e-36: the tile is computed again with scales of its own."""
    tensors = make((3, 4), batch=1)
    tensors['phi_q'], tensors['phi_k'] = tensors['phi_q'] * 1e-18, tensors['phi_k'] * 1e-18
    z, _ = run(tensors, grid_size=(3, 4))
    assert_right(tensors, result=(z, {}), output=2e-5, grid_size=(3, 4))


def test_signed_features():
    tensors = make((3, 4), batch=1)
    tensors['phi_q'][..., 0] -= 0.3
    assert_right(tensors, grid_size=(3, 4), result=run(tensors, grid_size=(3, 4), positive=False))


@pytest.mark.parametrize('m,d', [(100, 80), (3, 2), pytest.param(256, 128, marks=pytest.mark.slow)])
def test_features_in_chunks_and_odd_head_dims(m, d):
    assert_right(make((4, 3), m=m, d=d, batch=1), grid_size=(4, 3))
    assert_right(make((4, 3), m=m, d=d, batch=1, window=(3, 3)), grid_size=(4, 3))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_values(dtype):
    """Weights are rounded to v's dtype, sums are not; half a unit on each of weights, products and result."""
    unit = torch.finfo(dtype).eps
    assert_right(make((4, 5), dtype=dtype, batch=1), output=3 * unit, gradient=4 * unit, grid_size=(4, 5))


def test_a_wrong_table_is_noticed():
    tensors = make((3, 4), batch=1)
    result = run(tensors, grid_size=(3, 4))
    tensors['bias'] = tensors['bias'].flip(-1)
    with pytest.raises(AssertionError, match='off by'):
        assert_right(tensors, result=result, grid_size=(3, 4))
