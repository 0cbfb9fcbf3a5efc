"""What a plain algorithm is: one entry of the table in attention.py.

# B batch, K heads, N tokens, M features, D head dim, E = D+1 value columns, H×W grid (N = H·W)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..backends.interface import Case, Grid
from ..bias import Bias


class Call(NamedTuple):
    """One call: features, values with a column of ones, and which keys have what bias."""

    phi_q: torch.Tensor  # B, K, N, M
    phi_k: torch.Tensor  # B, K, N, M: zeros for masked keys
    v: torch.Tensor  # B, K, N, E
    bias: Bias | None  # the table is (K, 2H-1, 2W-1), a window beside far, or of cells
    grid: Grid  # a sequence is a 1×N grid; numbers, or symbols of a program that is being exported
    causal: bool = False
    key_mask: torch.Tensor | None = None  # B, N
    others: torch.Tensor | None = None  # K, 1 or B, K, 1: the largest bias of keys that somebody adds to the sums


class Scaled(NamedTuple):
    """Σ_j e^{b_{j-i} - t_i} φq_i·φk_j [v_j, 1]."""

    sums: torch.Tensor  # B, K, N, E
    top: torch.Tensor  # t, of a shape that expands to B, K, N: the largest bias that a query sees


class Algorithm(NamedTuple):
    """One way to the sums, in operators without side effects; autograd makes its gradients."""

    name: str
    serves: Callable[[Case], bool]
    cost: Callable[[Case], float]  # multiply-adds per head and batch item
    sums: Callable[[Call], Scaled]


def row_top(top: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
    """Maxima (..., K, ·) of rows with those of other keys counted in, a constant to autograd; zero if there is no key.

    It cancels in the quotient, so that nothing is lost with its gradient.
    """
    top = top.detach()
    if others is not None:
        top = torch.maximum(top, others.detach())
    return torch.where(top == -torch.inf, 0.0, top)


def weight(bias: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """e^{b-t}; of keys that a row does not see, which t does not bound, at most one, to be multiplied by zero."""
    x = bias - top
    return x.masked_fill(x > 0, 0).exp()  # not clamp, which has no gradient where b = t


def parts(size: int, length: int) -> int:
    """How many parts of a length hold a size, ⌈size/length⌉; an even number where that is a symbol.

    Exported programs take a size of one as a constant, and a symbol may turn out to be one; twice something is not.
    """
    if isinstance(size, torch.SymInt) or isinstance(length, torch.SymInt):
        return 2 * ((size + 2 * length - 1) // (2 * length))
    return -(-size // length)
