"""Derivatives of the op `attend`: first ones by its own backward, others by plain operators, and its rules for vmap.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W); a sequence is a 1×N grid
"""

from typing import Any

import torch

from .custom_op import attend, attend_backward
from .derivatives import Problem, plain_gradients, plain_sums, second_derivatives, tangents_of
from .transforms import Fold, Tensors, transformable

__all__ = ['differentiable_attend', 'differentiable_attend_backward', 'problem_of']


def problem_of(height: int, width: int, causal: bool, cell_rows: int = 0, cell_cols: int = 0) -> Problem:
    """What the plain sums are told of the op's arguments."""
    return Problem(height, width, causal, (cell_rows, cell_cols) if cell_rows else None)


# attend: phi_q, phi_k, v, bias, far, height, width, causal, positive, backend, cell_rows, cell_cols


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> Tensors:
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)
    return *inputs[:5], *output


def _differentiate(ctx: Any, grad: torch.Tensor | None, _: Any) -> Tensors:
    if grad is None:
        return (None,) * 12
    bias, far = ctx.needs_input_grad[3:5]
    options = *ctx.options[:5], bias or far, *ctx.options[5:], None
    *grads, d_bias, d_far = differentiable_attend_backward(*ctx.saved_tensors, grad, *options)
    return *grads, d_bias if bias else None, d_far if far else None, *(None,) * 7


def _tangents(ctx: Any, *tangents: torch.Tensor | None) -> Tensors:
    problem = problem_of(*ctx.options[:3], *ctx.options[5:])
    *tensors, _, den = ctx.saved_tensors
    z, _ = tangents_of(lambda *some: plain_sums(some, problem), tuple(tensors), tangents[:5])
    return z, torch.zeros_like(den)


@attend.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    fold = Fold(info.batch_size, by_heads=args[3] is not None)
    output = attend(*fold.inputs(args[:5], in_dims[:5]), *args[5:])
    return tuple(fold.unfold(x) for x in output), (0, 0)


# attend_backward: phi_q, phi_k, v, bias, far, z, den, grad, height, width, causal, positive, backend, bias_grad,
# cell_rows, cell_cols, log_den_grad


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> Tensors:
    height, width, causal, _, _, bias_grad, *cells, log_den_grad = inputs[8:]
    ctx.problem = problem_of(height, width, causal, *cells)
    # those of bias and far are empty where there is none, or nobody asks
    ctx.wanted = *(True,) * 3, *(bias_grad and x is not None for x in inputs[3:5])
    return *inputs[:5], inputs[7], log_den_grad


def _differentiate_backward(ctx: Any, *of_grads: torch.Tensor) -> Tensors:
    *tensors, grad, log_den_grad = ctx.saved_tensors
    given = tuple(x if wanted else None for x, wanted in zip(of_grads, ctx.wanted))
    *grads, of_grad, of_log_den = second_derivatives(tuple(tensors), grad, log_den_grad, given, ctx.problem)
    # z and den are functions of the others, whose gradients hold what goes through them
    return *grads, None, None, of_grad, *(None,) * 8, of_log_den


def _tangents_backward(ctx: Any, *tangents: torch.Tensor | None) -> Tensors:
    saved = ctx.saved_tensors
    found = tangents_of(
        lambda *some: plain_gradients(some[:5], some[5], some[6], ctx.problem),
        saved,
        (*tangents[:5], tangents[7], tangents[16]),
    )
    return tuple(x if wanted else saved[0].new_empty(0) for x, wanted in zip(found, ctx.wanted))


@attend_backward.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
    fold = Fold(info.batch_size, by_heads=args[3] is not None)
    options, bias_grad = list(args[8:]), args[13]
    if len(args) == 17:  # torch leaves out what is the default
        options[8] = fold.tokens(args[16], in_dims[16])
    *grads, d_bias, d_far = attend_backward(*fold.inputs(args[:8], in_dims[:8]), *options)
    has_bias, has_far = (bias_grad and x is not None for x in args[3:5])
    tables = fold.unfold_table(d_bias) if has_bias else d_bias, fold.unfold_table(d_far) if has_far else d_far
    return (*(fold.unfold(x) for x in grads), *tables), (0, 0, 0, 0 if has_bias else None, 0 if has_far else None)


differentiable_attend_backward = transformable(
    attend_backward, _keep_backward, _differentiate_backward, _tangents_backward
)
differentiable_attend = transformable(attend, _keep, _differentiate, _tangents)
