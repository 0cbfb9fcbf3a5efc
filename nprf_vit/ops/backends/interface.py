"""What a backend is: one entry of the table in ops/dispatch.py. docs/extending.md shows how to add one.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W); a sequence is a 1×N grid
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ..bias import Bias, BiasGradients

Grid = tuple[int, int]


class Case(NamedTuple):
    """What a call is about, as far as it decides which backends serve it and what they cost: never values."""

    grid: Grid
    m: int
    d: int
    causal: bool = False
    has_bias: bool = True
    radius: Grid | None = None  # (R, S) of a bias that is constant beyond it
    positive: bool = True
    device: str = 'cpu'
    feature_dtype: torch.dtype = torch.float32
    v_dtype: torch.dtype = torch.float32
    cells: Grid | None = None  # (h, w) of a bias between cells
    keys: int | None = None  # how many, where it is not as many as queries: then there is no bias

    @staticmethod
    def of(phi_q: torch.Tensor, v: torch.Tensor, bias: Bias | None, grid: Grid, causal: bool, positive: bool) -> 'Case':
        """The case of a call with features phi_q (..., M) and values v (..., D)."""
        radius = cells = None
        if bias is not None and bias.far is not None:
            radius = (bias.table.shape[1] // 2, bias.table.shape[2] // 2)
        if bias is not None and bias.cells is not None:
            h, w = bias.cells  # `kernel_attention` made a pair of a sequence's
            cells = (h, w)
        keys = v.shape[-2] if v.shape[-2] != phi_q.shape[-2] else None
        sizes, dtypes = (phi_q.shape[-1], v.shape[-1]), (phi_q.dtype, v.dtype)
        return Case(grid, *sizes, causal, bias is not None, radius, positive, v.device.type, *dtypes, cells, keys)

    @property
    def n(self) -> int:
        return self.grid[0] * self.grid[1]

    def __str__(self) -> str:
        between = '' if self.cells is None else f' between {self.cells[0]}x{self.cells[1]} cells'
        between += '' if self.keys is None else f', {self.n} queries and {self.keys} keys'
        return (
            f'{"causal" if self.causal else "non-causal"}, {"a" if self.has_bias else "no"} bias{between}, '
            f'{"no" if self.radius is None else "a"} far constant, '
            f'{"positive" if self.positive else "signed"} features on {self.device}'
        )


class Inputs(NamedTuple):
    """Features, values and bias of one call; the bias's table is (K, 2H-1, 2W-1), a window beside far, or of cells."""

    phi_q: torch.Tensor  # B, K, N, M
    phi_k: torch.Tensor  # B, K, N, M; without a bias and causality there may be more or fewer keys than queries
    v: torch.Tensor  # B, K, N, D
    bias: Bias | None


class Sums(NamedTuple):
    """Numerators Σ_j s_ij v_j and denominators Σ_j s_ij, s_ij = c_{j-i} φq_i·φk_j, up to a positive factor per row."""

    num: torch.Tensor  # B, K, N, D
    den: torch.Tensor  # B, K, N


class Partial(NamedTuple):
    """Attention over some of the keys, and what it takes to add it to that over others."""

    z: torch.Tensor  # B, K, N, D
    log_den: torch.Tensor  # B, K, N: log |Σ_j e^{b_{j-i}} φq_i·φk_j|, with nothing left out; -inf where the sum is zero
    sign: torch.Tensor | None = None  # B, K, N: of the sum, where features may be negative


class Gradients(NamedTuple):
    """Gradients of `Inputs`, field by field."""

    phi_q: torch.Tensor
    phi_k: torch.Tensor
    v: torch.Tensor
    bias: BiasGradients


class Forward(Protocol):
    def __call__(self, inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype) -> Sums:
        """The sums in v's dtype, computed in `dtype`."""


class Backward(Protocol):
    def __call__(
        self, inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype, grad: torch.Tensor, bias_grad: bool
    ) -> Gradients:
        """Given grad (B, K, N, D+1) of numerators and denominators; computes the scores again."""


class WorkingDtype(Protocol):
    def __call__(self, inputs: Inputs, grid: Grid, causal: bool) -> torch.dtype | None:
        """The narrowest dtype in which the algorithm holds its promise for these values, or None if there is none."""


class LogScale(Protocol):
    def __call__(self, inputs: Inputs, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
        """The logarithm of what the sums of `forward` are to be multiplied by, of a shape that expands to (B, K, N)."""


@dataclass(frozen=True)
class Product:
    """An algorithm for the sums, which ops/custom_op.py turns into an op with gradients and a rescue of small sums."""

    forward: Forward
    backward: Backward
    working_dtype: WorkingDtype
    # Off the CPU backends/batched.py stands in for it: few launches, and nothing read on the host. False for one that
    # has both itself.
    batched: bool = True
    # Without causality. None where nobody has written down what factor a row's sums have: then they cannot be added to
    # those over other keys (ops/partial.py).
    log_scale: LogScale | None = None
    # Whether `backward` uses that the gradients of all of a head's biases add up to zero. Then it takes one more
    # argument: what they add up to (K,) where denominators have a gradient of their own, else None.
    uses_bias_total: bool = False


@dataclass(frozen=True)
class Whole:
    """An attention from end to end, with gradients of its own, for what is no product of ours."""

    attend: Callable[[Inputs, Case], torch.Tensor]  # (B, K, N, D) in v's dtype
    # From qkv (B, N, 3, K, D), projections (K, M, D) and the bias to (B, N, K, D), features included.
    attend_packed: Callable[[torch.Tensor, torch.Tensor, Bias | None, Case], torch.Tensor] | None = None
    # Whether `auto` takes it whatever the sizes, which may be symbols while a program is exported.
    preferred: Callable[[Case], bool] = lambda case: False
    # As `attend`, with the signed denominators' logarithms (B, K, N) and signs; both have gradients.
    attend_partial: Callable[[Inputs, Case], Partial] | None = None


@dataclass(frozen=True)
class Backend:
    """One entry: what it serves, what it costs, and what it runs."""

    name: str
    why_not: Callable[[Case], str | None]  # what keeps it from serving a case, in a few words
    cost: Callable[[Case], float | None]  # in multiply-adds of `direct`; None where only its name may choose it
    run: Product | Whole


def own_dtype(inputs: Inputs, grid: Grid, causal: bool) -> torch.dtype:
    """The working dtype of an algorithm that holds its promise in the values' own."""
    return inputs.v.dtype


def serves_all(case: Case) -> str | None:
    """`why_not` of a backend that takes every case."""
    return None


def not_between_cells(case: Case) -> str | None:
    """`why_not` of a backend that looks biases up by the offset of tokens; one token per cell is no obstacle."""
    return None if case.cells in (None, case.grid) else 'the bias is between cells'


def widen(inputs: Inputs) -> Inputs:
    """Inputs in float64: what zero keys above their row's maximum would count for is beyond float32."""
    phi_q, phi_k, v, bias = inputs
    bias = None if bias is None else bias._replace(table=bias.table.double())
    return Inputs(phi_q.double(), phi_k.double(), v.double(), bias)


def narrow(grads: Gradients) -> Gradients:
    """Gradients in float32, none beyond its range."""
    largest = torch.finfo(torch.float32).max
    phi_q, phi_k, v = (x.clamp(-largest, largest).float() for x in grads[:3])
    table = grads.bias.table
    return Gradients(phi_q, phi_k, v, BiasGradients(None if table is None else table.clamp(-largest, largest).float()))


def by_name_only(case: Case) -> float | None:
    """`cost` of a backend that `auto` never takes."""
    return None
