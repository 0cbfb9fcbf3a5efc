"""Launches on the meta device: how many, in what scratch, with offsets of how many bits. No kernel runs."""

import pytest
import torch

pytest.importorskip('triton')

from nprf_vit.ops.kernels.tile_table import SMALL, TABLE, tile_for  # noqa: E402
from nprf_vit.ops.kernels.variants import Variant, launches_of  # noqa: E402

GRIDS = {'full': (14, 14), 'window': (128, 128), 'causal': (1, 3072), 'causal window': (1, 3072), 'none': (64, 64)}


@pytest.mark.parametrize('bias', GRIDS)
@pytest.mark.parametrize('batch', [1, 128])
def test_launches_per_layer(bias, batch):
    forward, backward = launches_of(Variant(bias, torch.bfloat16, 32, 64), batch, grid=GRIDS[bias])
    assert len(forward) <= 3 and len(backward) <= 8


@pytest.mark.parametrize('batch', [1, 8, 1024])
@pytest.mark.parametrize('bias,grid', [('full', (14, 14)), ('full', (128, 128)), ('window', (128, 128))])
def test_scratch_of_the_bias_gradient(batch, bias, grid):
    _, backward = launches_of(Variant(bias, torch.bfloat16, 32, 64), batch, grid=grid)
    (launch,) = [x for x in backward if x.kernel.__name__ == 'bias_gradient_parts']
    assert launch.arguments['scratch'].numel() * 4 <= 64 << 20


def test_scratch_of_a_long_causal_sequence():
    _, backward = launches_of(Variant('causal', torch.bfloat16, 32, 64), 8, grid=(1, 65536))
    (launch,) = [x for x in backward if x.kernel.__name__ == 'bias_gradient_parts']
    assert launch.arguments['scratch'].numel() * 4 <= 64 << 20


def test_tokens_far_apart_have_64_bit_offsets():
    """12 heads of 64 in a packed projection: the token stride is 2304, and passes 2³¹ at 932068 tokens."""
    for grid, long in (((900, 1000), False), ((1000, 1000), True)):
        forward, backward = launches_of(Variant('window', torch.bfloat16, 32, 64), 1, grid=grid)
        flags = [x.arguments['LONG'] for x in forward + backward if 'v_stride_n' in x.arguments]
        assert flags and all(flag == long for flag in flags)
        reads_qkv = [x for x in forward + backward if 'q' in x.arguments]
        assert all(x.arguments['LONG'] == long for x in reads_qkv)


def test_every_tile_can_be_launched():
    for tile in (tile for table in (TABLE, SMALL) for row in table.values() for tile in row if tile):
        assert tile.warps in (1, 2, 4, 8) and tile.own in (16, 32, 64)
    assert SMALL.keys() <= TABLE.keys()


@pytest.mark.parametrize('m,d,small', [(8, 64, True), (16, 64, True), (256, 32, True), (17, 33, False)])
def test_small_blocks_have_tiles_of_their_own(m, d, small):
    v = torch.empty(1, 1, 1, d, dtype=torch.bfloat16, device='meta')
    assert tile_for('feature_map_gradient', v, m) == (SMALL if small else TABLE)['feature_map_gradient'][0]
    assert tile_for('feature_map', v, m) == TABLE['feature_map'][0]
