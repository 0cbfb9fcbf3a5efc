"""Derivatives of higher order and of forward mode: the sums written in plain operators, with all weights stored.

The ops compute first derivatives in reverse mode by algorithms of their own. Whatever goes beyond, torch derives from
these sums, at O(N²) memory.

# B batch, K heads, N queries, L keys, M features, D head dim
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .cell_grid import expand_cells
from .offsets import expand_table, extend_table

Tensors = tuple[torch.Tensor | None, ...]


class Problem(NamedTuple):
    """What the sums are about, besides tensors."""

    height: int
    width: int
    causal: bool
    cells: tuple[int, int] | None


def plain_sums(tensors: Tensors, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (B, K, N, D) and the logarithms of its denominators (B, K, N), of phi_q, phi_k, v, bias and far.

    A query without any weight has the output 0, the logarithm -inf and no derivatives.
    """
    phi_q, phi_k, v, bias, far = tensors
    assert phi_q is not None and phi_k is not None and v is not None
    # on the CPU in float64, where others may be far slower: nothing here repeats sums that underflow
    dtype = torch.float64 if v.device.type == 'cpu' else v.dtype
    phi_q, phi_k, values = phi_q.to(dtype), phi_k.to(dtype), v.to(dtype)
    weight = phi_q @ phi_k.transpose(-1, -2)  # B, K, N, L
    top = weight.new_zeros(())
    if bias is not None:
        matrix = _matrix(bias.to(dtype), None if far is None else far.to(dtype), problem)  # K, N, N
        if problem.causal:
            matrix = matrix.masked_fill(_later(matrix), -torch.inf)
        top = matrix.detach().amax(-1)  # K, N
        top = torch.where(top > -torch.inf, top, 0)
        weight = weight * (matrix - top.unsqueeze(-1)).exp()
    elif problem.causal:
        weight = weight.masked_fill(_later(weight), 0)
    den = weight.sum(-1)
    none = den == 0
    den = torch.where(none, 1, den)
    z = torch.where(none.unsqueeze(-1), 0, weight @ values / den.unsqueeze(-1))
    log_den = torch.where(none, -torch.inf, den.abs().log() + top)
    return z.to(v.dtype), log_den.to(v.dtype)


def _matrix(bias: torch.Tensor, far: torch.Tensor | None, problem: Problem) -> torch.Tensor:
    grid = problem.height, problem.width
    if problem.cells is not None:
        return expand_cells(bias, problem.cells, grid)
    return expand_table(bias if far is None else extend_table(bias, far, *grid), grid)


def _later(x: torch.Tensor) -> torch.Tensor:
    """(N, N) whether a key comes after the query."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


def plain_gradients(
    tensors: Tensors, grad: torch.Tensor, log_den_grad: torch.Tensor | None, problem: Problem
) -> Tensors:
    """Gradients of phi_q, phi_k, v, bias and far, None where there is none, given those of output and logarithms."""
    given = [x for x in tensors if x is not None]
    outputs, pull = torch.func.vjp(lambda *some: plain_sums(_fill(some, tensors), problem), *given)
    none = torch.zeros_like(outputs[1]) if log_den_grad is None else log_den_grad
    return _fill(pull((grad, none)), tensors)


def second_derivatives(
    tensors: Tensors, grad: torch.Tensor, log_den_grad: torch.Tensor | None, of_grads: Tensors, problem: Problem
) -> Tensors:
    """Gradients of the arguments of `plain_gradients`, in their order, given those of its outputs."""
    arguments = *tensors, grad, log_den_grad
    given = [x for x in arguments if x is not None]
    wanted = tuple(x is not None for x in of_grads)

    def gradients(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, g, log_g = _fill(some, arguments)
        found = plain_gradients(tuple(inputs), g, log_g, problem)
        return tuple(x for x, asked in zip(found, wanted) if asked and x is not None)

    _, pull = torch.func.vjp(gradients, *given)
    return _fill(pull(tuple(x for x in of_grads if x is not None)), arguments)


def tangents_of(function: Callable[..., Tensors], tensors: Tensors, tangents: Tensors) -> Tensors:
    """The tangents of a function's outputs, given those of its arguments; None are zero.

    By reverse mode twice, as the gradient of u·J by u is J: torch has no forward mode inside forward mode.
    """
    given = [x for x in tensors if x is not None]
    directions = [torch.zeros_like(x) if t is None else t for x, t in zip(tensors, tangents) if x is not None]
    shape: list[bool] = []

    def present(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = function(*_fill(some, tensors))
        shape[:] = [x is not None for x in found]
        return tuple(x for x in found if x is not None)

    outputs, pull = torch.func.vjp(present, *given)
    _, transpose = torch.func.vjp(lambda *u: pull(u), *(torch.zeros_like(x) for x in outputs))
    left = iter(transpose(tuple(directions)))
    return tuple(next(left) if there else None for there in shape)


def _fill(some: tuple[torch.Tensor, ...], like: Tensors) -> Tensors:
    """The tensors at the places where `like` has some, None elsewhere."""
    left = iter(some)
    return tuple(None if x is None else next(left) for x in like)
