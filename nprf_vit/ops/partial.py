"""Attention over some of the keys, with the logarithms of its denominators, so that others can be added to it.

`attend` gives denominators up to a factor per row, which no sum over other keys has. Here they are whole, as
logarithms, and have gradients.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W); a sequence is a 1×N grid
"""

from typing import Any

import torch

from . import custom_op
from .attend_autograd import differentiable_attend_backward, problem_of
from .backends import batched
from .backends.interface import Case, Grid, Inputs, Partial
from .derivatives import plain_sums, tangents_of
from .dispatch import product, whole
from .precision import without_autocast
from .transforms import Fold, Tensors, transformable, transformed


@torch.library.custom_op('nprf_vit::attend_partial', mutates_args=())
def attend_partial(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    height: int,
    width: int,
    positive: bool,
    backend: str,
    cell_rows: int = 0,
    cell_cols: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention, the denominators (B, K, N) of `attend`, and log |Σ_j e^{b_{j-i}} φq_i·φk_j| (B, K, N)."""
    tensors = phi_q, phi_k, v, bias, far
    options = height, width, False, positive, backend, cell_rows, cell_cols
    with without_autocast(v):
        z, den = custom_op.attend(*tensors, *options)
        log_den = _log_den(den, tensors, options)
        if positive and den.dtype == torch.float32 and not custom_op._is_batched(v, backend):
            # rows that `attend` computed in float64 have their denominators there too
            lost = (den < custom_op._SMALL) & den.isfinite()
            if lost.any():
                wide = tuple(None if x is None else x.double() for x in tensors)
                log_den = torch.where(lost, attend_partial(*wide, *options[:2], *options[3:])[2].float(), log_den)
    return z, den, log_den


def _log_den(den: torch.Tensor, tensors: custom_op.Tensors, options: custom_op.Options) -> torch.Tensor:
    """log |den| with what the algorithm left out of it."""
    bias, far = tensors[3:]
    inputs, case = custom_op._case(tensors, options)
    if custom_op._is_batched(inputs.v, options[4]):
        scale = batched.log_scale(inputs.phi_k, inputs.v, bias, far, case.grid, case.cells)
    else:
        algorithm, dtype = product(options[4], case, inputs)
        if algorithm.log_scale is None:
            raise ValueError(f'backend {options[4]!r} has no log_scale: its sums cannot be added to those over others')
        scale = algorithm.log_scale(inputs, case.grid, dtype)
    return (den.abs().log() + scale).masked_fill(den.isinf() | (den == 0), -torch.inf)


@attend_partial.register_fake
def _(
    phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    z = torch.empty_like(v, memory_format=torch.contiguous_format)
    return z, v.new_empty(v.shape[:-1]), v.new_empty(v.shape[:-1])


# attend_partial: phi_q, phi_k, v, bias, far, height, width, positive, backend, cell_rows, cell_cols


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> Tensors:
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)
    return *inputs[:5], *output[:2]


def _differentiate(ctx: Any, grad: torch.Tensor | None, _: Any, log_den_grad: torch.Tensor | None) -> Tensors:
    if grad is None and log_den_grad is None:
        return (None,) * 11
    saved = ctx.saved_tensors  # once: gradient checkpointing frees what is read
    grad = torch.zeros_like(saved[5]) if grad is None else grad
    bias, far = ctx.needs_input_grad[3:5]
    height, width, positive, backend, *cells = ctx.options
    options = height, width, False, positive, backend, bias or far, *cells, log_den_grad
    *grads, d_bias, d_far = differentiable_attend_backward(*saved, grad, *options)
    return *grads, d_bias if bias else None, d_far if far else None, *(None,) * 6


def _tangents(ctx: Any, *tangents: torch.Tensor | None) -> Tensors:
    height, width, _, _, *cells = ctx.options
    problem = problem_of(height, width, False, *cells)
    *tensors, _, den = ctx.saved_tensors
    z, log_den = tangents_of(lambda *some: plain_sums(some, problem), tuple(tensors), tangents[:5])
    return z, torch.zeros_like(den), log_den


@attend_partial.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    fold = Fold(info.batch_size, by_heads=args[3] is not None)
    output = attend_partial(*fold.inputs(args[:5], in_dims[:5]), *args[5:])
    return tuple(fold.unfold(x) for x in output), (0, 0, 0)


differentiable_attend_partial = transformable(attend_partial, _keep, _differentiate, _tangents)


def partial_attention(inputs: Inputs, grid: Grid, positive: bool, backend: str) -> Partial:
    """Attention over the keys of `inputs`, with features in float32 or float64, by a backend of `dispatch.names()`."""
    phi_q, phi_k, v, bias = inputs
    case = Case.of(phi_q, v, bias, grid, False, positive)
    table, far, cells = bias or (None, None, None)
    run = whole(backend, case, transformed(phi_q, phi_k, v, table, far))
    if run is not None:
        if run.attend_partial is None:
            raise ValueError(f'backend {backend!r} gives no denominators: expected another one, or auto')
        return run.attend_partial(inputs, case)
    tensors = phi_q, phi_k, v.to(phi_q.dtype), table, far
    z, den, log_den = differentiable_attend_partial(*tensors, *grid, positive, backend, *(cells or (0, 0)))
    return Partial(z, log_den, None if positive else den.detach().sign())
