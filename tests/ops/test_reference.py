"""The oracle itself, against loops over tokens that a reader can check by eye."""

import math
from fractions import Fraction

import pytest
import torch

from nprf_vit.ops import reference

from .compare import make_case


def cell_of(token, case):
    """Row and column of the cell that holds a token, by the definition, in fractions."""
    height, width = case.grid_size or (1, case.v.shape[2])
    rows, cols = (1, case.cells) if case.grid_size is None else case.cells
    y, x = divmod(token, width)
    half = Fraction(1, 2)
    return math.floor((y + half) * rows / height), math.floor((x + half) * cols / width)


def looped(case, i_head=0):
    """Eq. 10 for one batch item and head, a token pair at a time."""
    n, (q, k, v) = case.v.shape[2], (t[0, i_head] for t in (case.phi_q, case.phi_k, case.v))
    z = torch.zeros_like(v)
    for i in range(n):
        total = 0.0
        for j in range(n):
            if case.causal and j > i:
                continue
            if case.bias is None:
                b = 0.0
            elif case.cells is not None:
                (y, x), (ky, kx) = cell_of(i, case), cell_of(j, case)
                table = case.bias[i_head].reshape(-1, case.bias.shape[-1])
                b = table[ky - y + table.shape[0] // 2, kx - x + table.shape[1] // 2].item()
            elif case.grid_size is None:
                b = case.bias[i_head, j - i + n - 1].item()
            else:
                height, width = case.grid_size
                b = case.bias[i_head, j // width - i // width + height - 1, j % width - i % width + width - 1].item()
            weight = math.exp(b) * (q[i] @ k[j]).item()
            total += weight
            z[i] += weight * v[j]
        z[i] /= total
    return z


@pytest.mark.parametrize(
    ('n', 'grid_size', 'causal', 'std'),
    [
        (1, None, False, 1.0),
        (5, None, False, 1.0),
        (5, None, True, 1.0),
        (4, None, True, None),
        (6, (3, 2), False, 1.0),
    ],
)
def test_attention_is_the_equation(n, grid_size, causal, std):
    case = make_case(n, grid_size, causal, std=std)
    torch.testing.assert_close(reference.attention(**case.arguments())[0, 1], looped(case, 1))


@pytest.mark.parametrize(
    ('n', 'grid_size', 'cells'),
    [(7, None, 3), (6, None, 1), (35, (5, 7), (3, 2)), (35, (5, 7), (5, 4)), (6, (3, 2), (3, 2)), (1, (1, 1), (1, 1))],
)
def test_cells_are_the_equation(n, grid_size, cells):
    case = make_case(n, grid_size, cells=cells, std=1.0)
    torch.testing.assert_close(reference.attention(**case.arguments())[0, 1], looped(case, 1))


def test_tokens_lie_in_the_cell_of_their_centre():
    assert reference.offsets(7, None, 3)[0][0].tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert reference.offsets(5, None, 2)[0][0].tolist() == [0, 0, 1, 1, 1]  # a centre on a border counts to the right
    rows, cols = reference.offsets(8, (4, 2), (2, 1))
    assert rows[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1] and not cols.any()


def test_far_is_the_bias_of_every_offset_outside_the_table():
    window = torch.arange(1.0, 10.0).view(1, 3, 3)
    dense = reference.dense_bias(window, 12, (3, 4), far=torch.tensor([-1.0]))
    assert dense[0, 5].view(3, 4).tolist() == [[1, 2, 3, -1], [4, 5, 6, -1], [7, 8, 9, -1]]
    assert dense[0, 0].view(3, 4).tolist() == [[5, 6, -1, -1], [8, 9, -1, -1], [-1, -1, -1, -1]]


def test_a_table_wider_than_the_grid_is_cropped_to_it():
    wide = torch.randn(2, 9, 7)
    cropped = reference.dense_bias(wide[:, 2:-2, 2:-2], 6, (3, 2))
    assert torch.equal(reference.dense_bias(wide, 6, (3, 2), far=torch.zeros(2)), cropped)


def test_a_table_that_lacks_offsets_is_refused():
    with pytest.raises(IndexError, match=r'\(2, 3, 3\) lacks offsets of 6 tokens'):
        reference.dense_bias(torch.zeros(2, 3, 3), 6, (3, 2))


def test_log_space_agrees_with_plain_space():
    case = make_case(7, causal=True, std=2.0)
    arguments = {'bias': case.bias, 'causal': True}
    logs = reference.log_attention_weights(case.phi_q.log(), case.phi_k.log(), **arguments)
    torch.testing.assert_close(logs, reference.attention_weights(case.phi_q, case.phi_k, **arguments))


def test_extreme_biases_do_not_underflow():
    case = make_case(4, causal=True)
    case.bias = torch.full((2, 7), 80.0, dtype=torch.float64)
    case.bias[:, 3] = -80.0  # the zero offset, all that the first token sees
    weights = case.weights()
    assert weights.isfinite().all()
    assert torch.equal(weights[..., 0, 0], torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize('kind', ['prf', 'trf'])
def test_features_estimate_the_softmax_kernel(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, 4, generator=generator, dtype=torch.float64) / 3
    w = torch.randn(1, 200_000, 4, generator=generator, dtype=torch.float64)
    phi = reference.features(x, w, kind)
    # Monte Carlo with 2e5 draws: relative standard error of about 1 % at these norms
    torch.testing.assert_close(phi @ phi.mT, (x @ x.mT).exp(), rtol=0.05, atol=0.02)


def test_toeplitz_is_a_sum_over_offsets():
    table, x = torch.arange(5.0).view(1, 5), torch.tensor([1.0, 10.0, 100.0]).view(1, 1, 3, 1)
    # y_i = Σ_j t[j-i+2] x_j
    assert reference.toeplitz_matmul(table, x).flatten().tolist() == [432.0, 321.0, 210.0]
