import copy
import io

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


@pytest.mark.parametrize('change', ['step', 'data', 'load', 'set'])
def test_cache_never_serves_a_stale_table(change):
    bias = RelPosBias((3, 3), 2)
    with torch.no_grad():
        first = bias((5, 4))
        assert bias((5, 4)) is first
    if change == 'step':
        bias((5, 4)).sum().backward()
        torch.optim.SGD(bias.parameters(), lr=1.0).step()
    elif change == 'data':
        bias.table.data.add_(1)
    elif change == 'load':
        bias.load_state_dict({'table': torch.ones(2, 5, 5)})
    else:
        bias.set_grid_size((4, 4))
    with torch.no_grad():
        second = bias((5, 4))
    torch.testing.assert_close(second, resize_table(bias.table, (5, 4)))
    assert change == 'set' or not torch.equal(first, second)


def test_cache_is_not_used_with_gradients_and_stays_small():
    bias = RelPosBias((3, 3), 2)
    with torch.no_grad():
        for width in range(4, 20):
            bias((5, width))
    assert len(bias.resize.entries) == bias.resize.capacity
    assert bias((5, 4)).requires_grad
    with torch.inference_mode():
        bias((5, 19))
    bias((5, 19)).sum().backward()
    assert bias.table.grad.abs().sum() > 0


def test_cache_is_left_out_of_copies_and_files():
    bias = RelPosBias((3, 3), 2)
    with torch.no_grad():
        bias((5, 5))
    assert not copy.deepcopy(bias).resize.entries
    buffer = io.BytesIO()
    torch.save(bias, buffer)
    buffer.seek(0)
    assert not torch.load(buffer, weights_only=False).resize.entries
    assert set(bias.state_dict()) == {'table'}


def test_set_grid_size_then_own_grid():
    bias = RelPosBias((3, 3), 2)
    expected = resize_table(bias.table, (6, 2))
    bias.set_grid_size((6, 2))
    assert torch.equal(bias(), expected)
    assert isinstance(bias.table, torch.nn.Parameter) and bias.table.requires_grad


def test_wrong_number_of_dimensions():
    with pytest.raises(ValueError, match=r'expected \(H, W\) or \(N,\)'):
        RelPosBias((2, 2, 2), 1)
    with pytest.raises(ValueError, match='cannot serve'):
        RelPosBias((2, 2), 1)((4,))
