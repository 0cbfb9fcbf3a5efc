"""Every kind of bias with small blocks of head dims and features, which have tiles of their own, and larger ones."""

import pytest
import torch

from .cases import GRADIENT, OUTPUT, errors, make, run

CASES = {
    'grid': ({'grid': (2, 5)}, {'grid_size': (2, 5)}),
    'window': ({'grid': (3, 4), 'window': (3, 3)}, {'grid_size': (3, 4)}),
    'causal': ({'n': 18}, {'causal': True}),
    'causal window': ({'n': 18, 'window': (7,)}, {'causal': True}),
    'none': ({'n': 18, 'std': None}, {}),
}
FEW = [(8, 32), (16, 16), (32, 32), (32, 64)]
MORE = [(8, 16), (16, 32), (32, 16), (64, 32), (8, 64), (16, 128), (64, 64), (32, 128)]
UNIT = torch.finfo(torch.bfloat16).eps
# Of bfloat16 measured: outputs up to 1.7 units, gradients up to 4.4.
BOUNDS = {torch.float32: (OUTPUT, GRADIENT), torch.bfloat16: (3 * UNIT, 6 * UNIT)}


@pytest.mark.parametrize('m,d', [*FEW, *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in MORE)])
@pytest.mark.parametrize('dtype', BOUNDS)
@pytest.mark.parametrize('name', CASES)
def test_against_the_oracle(name, dtype, m, d):
    shape, options = CASES[name]
    tensors = make(**shape, m=m, d=d, batch=1, heads=1, dtype=dtype)
    z, gradients = run(tensors, **options)
    output, gradient = errors(tensors, (z, gradients), **options)
    if 'far' in gradient:
        # a sum over the pairs beyond a window that cancels: against the gradient of the bias, which has the same terms
        gradient['far'] *= min(1.0, (gradients['far'].norm() / gradients['bias'].norm()).item())
    assert output <= BOUNDS[dtype][0], output
    assert max(gradient.values()) <= BOUNDS[dtype][1], gradient
