import itertools

import pytest
import torch
from timm.layers import resize_rel_pos_bias_table_simple

from nprf_vit.layers import RelPosBias, expand_table, resize_table


def gather(table, grid_size):
    """The dense bias one entry at a time, from the definition."""
    height, width = grid_size if len(grid_size) == 2 else (1, *grid_size)
    table = table.reshape(table.shape[0], 2 * height - 1, 2 * width - 1)
    cells = [(y, x) for y in range(height) for x in range(width)]
    rows = [[table[:, ky - qy + height - 1, kx - qx + width - 1] for ky, kx in cells] for qy, qx in cells]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


@pytest.mark.parametrize('grid_size', [(1, 1), (1, 5), (3, 2), (4, 7), (6,)])
def test_expand_is_the_definition(grid_size):
    table = torch.randn(3, *[2 * s - 1 for s in grid_size])
    assert torch.equal(expand_table(table, grid_size), gather(table, grid_size))
    if table[0].numel() > 1:
        assert not torch.equal(expand_table(table.flip(-1), grid_size), gather(table, grid_size))


@pytest.mark.parametrize('new', [(4, 4), (9, 9), (7, 3), (20, 31)])
def test_resize_is_timms_for_swin(new):
    table = torch.randn(3, 13, 13)
    expected = resize_rel_pos_bias_table_simple(table, new, (3, 2 * new[0] - 1, 2 * new[1] - 1))
    assert torch.equal(resize_table(table, new), expected)


def test_resize_to_the_own_grid_changes_nothing():
    for shape, grid_size in (((2, 13, 5), (7, 3)), ((2, 9), (5,))):
        table = torch.randn(shape)
        assert torch.equal(resize_table(table, grid_size), table)


def test_resize_keeps_the_centre_and_symmetry():
    table = torch.randn(2, 9, 9)
    table = table + table.flip(1, 2)
    out = resize_table(table, (8, 6))
    torch.testing.assert_close(out, out.flip(1, 2))
    torch.testing.assert_close(out[:, 7, 5], table[:, 4, 4])


@pytest.mark.parametrize('change', ['step', 'data', 'load', 'set', 'result'])
def test_a_resized_table_is_never_stale(change):
    bias = RelPosBias((3, 3), 2)
    with torch.no_grad():
        first = bias((5, 4)).table
    if change == 'step':
        bias((5, 4)).table.sum().backward()
        torch.optim.SGD(bias.parameters(), lr=1.0).step()
    elif change == 'data':
        bias.table.data.add_(1)
    elif change == 'load':
        bias.load_state_dict({'table': torch.ones(2, 5, 5)})
    elif change == 'result':  # a caller may edit what it was given
        first.zero_()
    else:
        bias.set_grid_size((4, 4))
    with torch.no_grad():
        second = bias((5, 4)).table
    torch.testing.assert_close(second, resize_table(bias.table, (5, 4)))
    assert change == 'set' or not torch.equal(first, second)


def test_a_float64_table_is_resized_in_float64():
    table = torch.randn(2, 5, 5, dtype=torch.float64)
    wide, narrow = resize_table(table, (5, 4)), resize_table(table.float(), (5, 4))
    assert wide.dtype == torch.float64
    error = (wide - narrow).abs().max()
    assert 1e-9 < error < 1e-5  # rounded to float32 on the way they would be equal


def test_set_grid_size_then_own_grid():
    bias = RelPosBias((3, 3), 2)
    expected = resize_table(bias.table, (6, 2))
    bias.set_grid_size((6, 2))
    assert torch.equal(bias().table, expected)
    assert isinstance(bias.table, torch.nn.Parameter) and bias.table.requires_grad


def test_wrong_number_of_dimensions():
    with pytest.raises(ValueError, match=r'expected \(H, W\) or \(N,\)'):
        RelPosBias((2, 2, 2), 1)
    with pytest.raises(ValueError, match='cannot serve'):
        RelPosBias((2, 2), 1)((4,))


@pytest.mark.parametrize(('window', 'grid_size'), [((3, 2), (5, 7)), ((3, 4), (2, 6)), ((1, 1), (3, 3)), ((3,), (6,))])
def test_extend_keeps_the_window_and_continues_it(window, grid_size):
    bias = RelPosBias(window, 2, extend='extend')
    torch.nn.init.normal_(bias.table)
    torch.nn.init.normal_(bias.far)
    table, far, cells = bias(grid_size)
    assert cells is None
    assert table is bias.table and torch.equal(far, bias.beyond())
    whole = bias.whole_table(grid_size)
    assert whole.shape == (2, *(2 * s - 1 for s in grid_size))
    for index in itertools.product(*(range(-s + 1, s) for s in grid_size)):
        learned = all(abs(i) < s for i, s in zip(index, window))
        at = tuple(i + s - 1 for i, s in zip(index, window if learned else grid_size))
        expected = table[(slice(None), *at)] if learned else far
        assert torch.equal(whole[(slice(None), *(i + s - 1 for i, s in zip(index, grid_size)))], expected)
    bias.dense = True
    torch.testing.assert_close(bias(grid_size).matrix, gather(whole, grid_size))


def test_the_constant_starts_at_the_border_and_follows_it():
    bias = RelPosBias((2, 3), 1, extend='extend')
    with torch.no_grad():
        bias.table.copy_(torch.arange(15.0).view(1, 3, 5))
    ring = [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14]
    torch.testing.assert_close(bias.beyond(), torch.tensor([sum(ring) / len(ring)]))
    line = RelPosBias((3,), 1, extend='extend')
    with torch.no_grad():
        line.table.copy_(torch.tensor([[1.0, 9.0, 9.0, 9.0, 3.0]]))
    torch.testing.assert_close(line.beyond(), torch.tensor([2.0]))


def test_extend_loads_windows_of_any_size_under_the_same_parameter():
    source, bias = RelPosBias((2, 5), 3), RelPosBias((4, 4), 3, extend='extend')
    parameter = bias.table
    bias.load_state_dict(source.state_dict())
    assert bias.table is parameter and bias.grid_size == (2, 5)
    assert torch.equal(bias.table, source.table) and not bias.far.any()
    torch.nn.init.normal_(bias.far)
    again = RelPosBias((4, 4), 3, extend='extend')
    again.load_state_dict(bias.state_dict())
    assert torch.equal(again.far, bias.far) and torch.equal(again.table, bias.table)
    with pytest.raises(RuntimeError, match='size mismatch'):
        again.load_state_dict(RelPosBias((4, 4), 2).state_dict())


def test_unknown_continuation():
    with pytest.raises(ValueError, match="unknown rel_pos_extend 'stretch': expected one of interpolate, extend"):
        RelPosBias((2, 2), 1, extend='stretch')
