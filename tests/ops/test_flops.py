"""What FlopCounterMode counts: forward and backward, by backend, of every op; and what a mask changes: nothing."""

import math

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import nprf_vit  # noqa: F401  registers the models
from nprf_vit.ops import PrefixBias, kernel_attention, prefix_attention

B, K, M, D = 2, 3, 8, 4


def counted(function, *tensors):
    """FLOPs of the ops of this package, forward and backward, by name."""
    leaves = [t.requires_grad_() for t in tensors]
    with FlopCounterMode(display=False) as counter:
        function(*leaves).sum().backward()
    counts = {str(op).removeprefix('nprf_vit.'): n for op, n in counter.get_flop_counts()['Global'].items()}
    return {name: n / (2 * B * K) for name, n in counts.items() if name.startswith('attend')}


def inputs(n, keys=None):
    shapes = (n, M), (keys or n, M), (keys or n, D)
    return [torch.rand(B, K, *shape) + 0.1 for shape in shapes]


@pytest.mark.parametrize('backend', ['direct', 'auto'])
def test_direct(backend):
    count = counted(
        lambda *x: kernel_attention(*x, grid_size=(4, 5), backend=backend), *inputs(20), torch.zeros(K, 7, 9)
    )
    assert count == {'attend': 400 * (M + D + 1), 'attend_backward': 400 * (3 * M + 2 * D + 1)}


def test_direct_causal_is_half():
    count = counted(lambda *x: kernel_attention(*x, causal=True, backend='direct'), *inputs(20), torch.zeros(K, 39))
    assert count == {'attend': 200 * (M + D + 1), 'attend_backward': 200 * (3 * M + 2 * D + 1)}


def test_fft_counts_transforms():
    options = {'grid_size': (4, 5), 'backend': 'fft'}
    count = counted(lambda *x: kernel_attention(*x, **options), *inputs(20), torch.zeros(K, 7, 9))
    least = 2.5 * M * (D + 1) * 63 * math.log2(63)  # 7×9 points at least
    assert least < count['attend'] < 2 * least
    assert count['attend_backward'] == 2 * count['attend']


def test_linear_and_cross():
    size = M * (D + 1)
    assert counted(kernel_attention, *inputs(20)) == {'attend': 40 * size, 'attend_backward': 100 * size}
    assert counted(kernel_attention, *inputs(20, 7)) == {'attend': 27 * size, 'attend_backward': 61 * size}


def test_window_is_linear_in_the_tokens():
    """A bias of 3×3 offsets on 20×20 and 40×40 tokens; the dense count would be 16 times as large."""

    def count(side):
        table, far = torch.zeros(K, 3, 3), torch.zeros(K)
        options = {'grid_size': (side, side), 'backend': 'window'}
        return counted(lambda *x: kernel_attention(*x, **options), *inputs(side**2), table, far)

    small, large = count(20), count(40)
    assert large == {name: 4 * n for name, n in small.items()}
    keys, size = 100, M * (D + 1)  # blocks of 8×8 queries see 10×10 keys
    assert small == {
        'attend': 400 * (keys * (M + D + 1) + 2 * size),
        'attend_backward': 400 * (keys * (3 * M + 2 * D + 1) + 5 * size),
    }


def test_cells_by_either_backend():
    size, tensors = M * (D + 1), [*inputs(64), torch.zeros(K, 3, 3)]
    options = {'grid_size': (8, 8), 'cells': (2, 2)}
    assert counted(lambda *x: kernel_attention(*x, **options, backend='cells'), *tensors) == {
        'attend': (2 * 64 + 16) * size,
        'attend_backward': (5 * 64 + 48) * size,
    }
    dense = counted(lambda *x: kernel_attention(*x, **options, backend='direct'), *tensors)
    assert dense['attend'] == 64**2 * (M + D + 1)


def test_masked_keys_are_counted():
    """They are multiplied like others."""
    mask = torch.ones(B, 20, dtype=torch.bool)
    mask[:, 10:] = False
    tensors = [*inputs(20), torch.zeros(K, 7, 9)]
    masked = counted(lambda *x: kernel_attention(*x, grid_size=(4, 5), key_mask=mask), *tensors)
    assert masked == counted(lambda *x: kernel_attention(*x, grid_size=(4, 5)), *tensors)


def test_tokens_before_the_grid():
    """The op over the grid counts as without them, the few dense rows and columns by torch's own formulas."""
    prefix = [torch.zeros(K, 2), torch.zeros(K, 2), torch.zeros(K, 2, 2)]

    def attend(q, k, v, table):
        return prefix_attention(q, k, v, PrefixBias(*prefix), table, grid_size=(4, 5))

    count = counted(attend, *inputs(22), torch.zeros(K, 7, 9))
    assert count['attend_partial'] == 400 * (M + D + 1)
    assert count['attend_backward'] == 400 * (3 * M + 2 * D + 1)


def test_models_count_what_the_paper_counts():
    """1.23 GMACs at 224 px, of which torch's formulas alone see 1.10; an extended model grows with its tokens."""
    counts = {}
    with torch.device('meta'):
        for pixels in (224, 448, 896):
            options = {'rel_pos_extend': 'extend', 'rel_pos_size': (7, 7), 'img_size': pixels}
            model = timm.create_model('nprf_deit_tiny', **(options if pixels > 224 else {})).eval()
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(torch.empty(1, 3, pixels, pixels))
            counts[pixels] = counter.get_total_flops() / 2e9
    assert counts[224] == pytest.approx(1.23, abs=0.01)
    assert counts[896] < 4.1 * counts[448]
