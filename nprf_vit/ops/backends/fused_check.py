"""Whether the kernels may be used: on the first call per device, dtype and variant they are held against plain PyTorch.

NPRF_VIT_FUSED=0 never uses them, NPRF_VIT_FUSED=1 uses them unchecked.
"""

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch

from . import batched

if TYPE_CHECKING:
    from ..kernels.launch import Problem

# Of Σ_j a_ij|v_j| on every output, and half of it of each gradient's norm: eight roundings of the coarsest number on
# the way. TF32 and float16 round to 2^-11, bfloat16 to 2^-8; three TF32 products leave float32's own.
_ROUNDING = {'ieee': 2e-4, 'tf32x3': 2e-4, 'tf32': 2.0**-11}
_VALUES = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_verdicts: dict[tuple[Any, ...], bool] = {}


def is_trusted(v: torch.Tensor, m: int, problem: 'Problem') -> bool:
    """Whether the kernels run a problem of values v (B, K, N, D) and m features; the first call of a kind finds out."""
    setting = os.environ.get('NPRF_VIT_FUSED', '')
    if setting in ('0', '1'):
        return setting == '1'
    if not v.is_cuda:
        return True  # interpreted, which is itself a check
    kind = problem.bias, problem.causal, problem.positive, problem.grid[0] > 1, problem.precision
    variant = (v.device, v.dtype, m, v.shape[-1], *kind)
    if variant not in _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return True  # nothing can be compared within a graph; capture follows a run outside of it
        reason = find_fault(v.device, v.dtype, m, v.shape[-1], problem)
        _verdicts[variant] = reason is None
        if reason:
            warnings.warn(
                f'the fused kernels are not used on {v.device} for {v.dtype}: {reason}. Plain PyTorch runs instead. '
                'Please report it with the output of `python -m nprf_vit.doctor --csv FILE` (template "GPU report").',
                stacklevel=2,
            )
    return _verdicts[variant]


def find_fault(device: torch.device, dtype: torch.dtype, m: int, d: int, problem: 'Problem') -> str | None:
    """What is wrong with the kernels on a small random case of this kind, in a few words; None if nothing is."""
    try:
        errors = _errors(device, dtype, m, d, problem)
    except Exception as error:  # whatever a compiler, a driver or a launch may raise is the reason
        return f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}'
    allowed = 8 * max(_ROUNDING[problem.precision], _VALUES[dtype])
    for name, size in errors.items():
        limit = allowed if name == 'z' else 2 * allowed
        if not size <= limit:  # a NaN too
            return f'{name} is off by {size:.2g}, allowed {limit:.2g}'
    return None


def _errors(device: torch.device, dtype: torch.dtype, m: int, d: int, problem: 'Problem') -> dict[str, float]:
    """Errors of the output and of every gradient on 2 batch items, 2 heads and 35 tokens, against float64 sums."""
    from ..kernels.launch_backward import run_backward
    from ..kernels.launch_forward import run_forward

    grid = (5, 7) if problem.grid[0] > 1 else (1, 35)
    radius = {'none': (0, 0), 'full': (grid[0] - 1, grid[1] - 1), 'window': (min(grid[0] - 1, 1), 2)}[problem.bias]
    p = problem._replace(grid=grid, radius=radius, parts=0 if problem.causal or problem.bias == 'full' else 1)
    generator = torch.Generator().manual_seed(0)
    sizes = 2, 2, grid[0] * grid[1]
    phi_q, phi_k = (torch.rand(*sizes, m, generator=generator) + 0.1 for _ in range(2))
    v, grad = (torch.randn(*sizes, d, generator=generator).to(dtype) for _ in range(2))
    bias = far = None
    if problem.bias != 'none':
        bias = torch.randn(2, 2 * radius[0] + 1, 2 * radius[1] + 1, generator=generator) * 0.5
    if problem.bias == 'window':
        far = torch.randn(2, generator=generator) * 0.5
    table, beyond = (None if x is None else x.to(device) for x in (bias, far))
    inputs = phi_q.to(device), phi_k.to(device), v.to(device), table, beyond
    g, z, d_v = grad.to(device), torch.empty_like(inputs[2]), torch.empty_like(inputs[2])
    forward = run_forward(*inputs, p, z)
    d_q, d_k, *others = run_backward(*inputs, p, forward, g, d_v, bias is not None)
    table, beyond = (None if x is None else x.double() for x in (bias, far))
    exact = phi_q.double(), phi_k.double(), v.double(), table, beyond
    options = grid, problem.causal, problem.positive
    expected, den = batched.attend(*exact, *options)
    scale, _ = batched.attend(exact[0], exact[1], exact[2].abs(), table, beyond, *options)
    grads = batched.attend_backward(*exact, expected, den, grad.double(), grid, problem.causal, bias is not None)
    errors = {'z': ((z.cpu().double() - expected).abs() / scale).max().item()}
    for name, mine, truth in zip(('phi_q', 'phi_k', 'v', 'bias', 'far'), (d_q, d_k, d_v, *others), grads):
        if mine is not None:
            assert truth is not None  # the plain path was asked for the same
            errors[f'the gradient of {name}'] = ((mine.cpu().double() - truth).norm() / truth.norm()).item()
    return errors
