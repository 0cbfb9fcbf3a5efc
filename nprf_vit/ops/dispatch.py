"""The table of backends, and which one a call gets: by name, or the cheapest by a count of operations.

The count is a function of shapes only, the same on every run; nothing is timed.
"""

import torch

from .backends import cells, direct, fft, flex, fused_qkv, linear, step, window
from .backends.interface import Backend, Case, Inputs, Product, Whole

_ENTRIES = (direct, fft, linear, window, cells, step, flex, fused_qkv)
BACKENDS: dict[str, Backend] = {module.BACKEND.name: module.BACKEND for module in _ENTRIES}
# What runs where a product cannot hold its promise for the values at hand: `direct` holds it for all.
FALLBACK: Product = direct.PRODUCT


def choose_backend(
    grid: tuple[int, int],
    m: int,
    d: int,
    causal: bool,
    has_bias: bool,
    radius: tuple[int, int] | None = None,
    device: str = 'cpu',
    cells: tuple[int, int] | None = None,
) -> str:
    """The cheapest backend.

    Args:
        grid: (H, W), or (1, N) for a sequence.
        m: Features.
        d: Head dim.
        causal: Whether later keys are left out.
        has_bias: Whether there is a bias.
        radius: (R, S) of a bias that is constant beyond it, if it is.
        device: Device type.
        cells: (h, w) of a bias between cells, (1, h) on a sequence.
    """
    return choose(Case(grid, m, d, causal, has_bias, radius, device=device, cells=cells)).name


def names() -> tuple[str, ...]:
    """What a `backend` argument may say."""
    return ('auto', *BACKENDS)


def choose(case: Case) -> Backend:
    """What 'auto' takes: an entry that is preferred whatever the sizes, else the cheapest."""
    entry = preferred(case)
    if entry is not None:
        return entry
    costs = count(case)
    return BACKENDS[min(costs, key=costs.__getitem__)]


def preferred(case: Case) -> Backend | None:
    """The entry that 'auto' takes without a look at the sizes, if there is one."""
    for entry in BACKENDS.values():
        if isinstance(entry.run, Whole) and entry.run.preferred(case) and entry.why_not(case) is None:
            return entry
    return None


def count(case: Case) -> dict[str, float]:
    """Cost of each backend that 'auto' may take, in multiply-adds of `direct`."""
    costs = {name: entry.cost(case) for name, entry in BACKENDS.items() if entry.why_not(case) is None}
    return {name: cost for name, cost in costs.items() if cost is not None}


def named(backend: str, case: Case) -> Backend | None:
    """The entry of that name, None for 'auto'; raises for a name that is none, or that does not serve the case."""
    if backend == 'auto':
        return None
    if backend not in BACKENDS:
        raise ValueError(f'unknown backend {backend!r}: expected one of {", ".join(names())}')
    reason = BACKENDS[backend].why_not(case)
    if reason is not None:
        able = ', '.join(name for name in names() if name == 'auto' or BACKENDS[name].why_not(case) is None)
        raise ValueError(f'backend {backend!r} cannot serve this case ({case}): {reason}; expected one of {able}')
    return BACKENDS[backend]


def whole(backend: str, case: Case, transformed: bool = False) -> Whole | None:
    """What runs the call from end to end, or None where it is a product for ops/custom_op.py.

    Inside a transform of `torch.func`, or in forward mode, only products serve.
    """
    entry = named(backend, case) or preferred(case)
    if entry is None or not isinstance(entry.run, Whole):
        return None
    if not transformed:
        return entry.run
    if backend != 'auto':
        able = ', '.join(name for name, other in BACKENDS.items() if isinstance(other.run, Product))
        raise ValueError(
            f'backend {backend!r} has neither torch.func nor forward-mode derivatives: expected auto or one of {able}'
        )
    return None


def product(backend: str, case: Case, inputs: Inputs) -> tuple[Product, torch.dtype]:
    """The algorithm for the sums and its working dtype: the one asked for, or the fallback if its range ends."""
    algorithm = (named(backend, case) or choose(case)).run
    assert isinstance(algorithm, Product)  # others were taken by `whole`
    dtype = algorithm.working_dtype(inputs, case.grid, case.causal)
    return (algorithm, dtype) if dtype is not None else (FALLBACK, inputs.v.dtype)


def fitted_fft_point(
    grid: tuple[int, int], m: int, d: int, fft_seconds: float, direct_seconds: float, device: str = 'cpu'
) -> float:
    """The FFT_POINT with which the model has the ratio of fft to direct, on CUDA to fused, that was measured."""
    costs = count(Case(grid, m, d, device=device))
    return fft.fft_point(device) * (fft_seconds / direct_seconds) / (costs['fft'] / costs['direct'])
