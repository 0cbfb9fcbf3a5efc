"""The opaque op that autograd, compile and export see: normalization, rescue and dispatch to one algorithm.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W); a sequence is a 1×N grid
"""

from typing import Any

import torch

from .backends import batched
from .backends.interface import Case, Grid, Inputs, Product, Sums
from .bias import Bias
from .checks import check_tokens, is_empty
from .dispatch import BACKENDS, product
from .nonfinite import without_nonfinite
from .offsets import peaked_heads
from .precision import without_autocast
from .scratch import keep_freed_pages

Tensors = tuple[torch.Tensor | None, ...]
Options = tuple[int, int, bool, bool, str, int, int]  # height, width, causal, positive, backend, cell_rows, cell_cols
# Below this a float32 denominator has lost digits to underflow and the product is repeated in float64.
_SMALL = 1e-30
# Gradients are divided by denominators: beside large values and keys these overflow long before the sums lose digits.
_SMALL_IN_BACKWARD = 1e-20


@torch.library.custom_op('nprf_vit::attend', mutates_args=())
def attend(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    backend: str,
    cell_rows: int = 0,
    cell_cols: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its denominators (B, K, N). Opaque, because backends look at the bias's values.

    Cells are 0×0 where the bias is not between cells, as in graphs that were exported before there were any.
    """
    check_tokens(phi_q.shape[2], phi_k.shape[2], height, width, apart=bias is None and not causal)
    if is_empty(v):
        return v.new_empty(*phi_q.shape[:-1], v.shape[-1]), v.new_empty(phi_q.shape[:-1])
    if v.device.type == 'cpu':
        keep_freed_pages()
    inputs = phi_q, phi_k, v, bias, far
    options = height, width, causal, positive, backend, cell_rows, cell_cols
    with without_autocast(v):
        if _is_batched(v, backend):
            return batched.attend(*inputs, (height, width), causal, positive, _cells(options))
        num, den = _forward(inputs, options)
        # signed features that see no key: no output and no gradient, as `_rescue` has it for positive ones
        den = den.clamp(min=torch.finfo(den.dtype).tiny) if positive else den.masked_fill(den == 0, torch.inf)
        den = den.contiguous()
        z = num.div_(den.unsqueeze(-1)).contiguous()
        # one pass over the outputs tells that all inputs were finite and nothing overflowed
        finite = bool((z.sum() + den.sum()).isfinite())
        tokens = without_nonfinite(phi_k, v) if causal and not finite else None
        if tokens is not None:
            z, den = attend(phi_q, tokens.phi_k, tokens.v, bias, far, *options)
            return z.add_(tokens.reach), den
        return _rescue(z, den, finite, inputs, options) if positive else (z, den)


def _rescue(
    z: torch.Tensor, den: torch.Tensor, finite: bool, inputs: Tensors, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeats rows in float64 that float32 cannot hold, and marks denominators for backward.

    Saved denominators are below _SMALL where backward must work in float64, and inf where no key has any weight: then
    the output is zero and so are the gradients.
    """
    tiny = torch.finfo(den.dtype).tiny
    if den.dtype == torch.float64:
        return z, den.masked_fill_(den <= tiny, torch.inf)
    lost = den < _SMALL
    if not finite:
        lost |= ~(den.isfinite() & z.isfinite().all(-1))
    if lost.any():
        # only the rows that need it: a causal token may not change because a later one underflows
        wide, wide_den = attend(*_double(*inputs), *options)
        z = torch.where(lost.unsqueeze(-1), wide.float(), z)
        den = den.where(den.isfinite(), tiny).masked_fill_(lost & wide_den.isinf(), torch.inf)
    return z, den


@attend.register_fake
def _(
    phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # of as many tokens as there are queries
    return v.new_empty(*phi_q.shape[:-1], v.shape[-1]), v.new_empty(phi_q.shape[:-1])


@torch.library.custom_op('nprf_vit::attend_backward', mutates_args=())
def attend_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    z: torch.Tensor,
    den: torch.Tensor,
    grad: torch.Tensor,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    backend: str,
    bias_grad: bool,
    cell_rows: int = 0,
    cell_cols: int = 0,
    log_den_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of phi_q, phi_k, v, bias and far; those of bias and far empty where there are none.

    `log_den_grad` (B, K, N) is the gradient of log |den|, which ops/partial.py has as an output.
    """
    options = height, width, causal, positive, backend, cell_rows, cell_cols
    if is_empty(v):
        wanted = phi_q, phi_k, v, *(x if bias_grad else None for x in (bias, far))
        return tuple(v.new_empty(0) if x is None else torch.zeros_like(x) for x in wanted)
    with without_autocast(v):
        if _is_batched(v, backend):
            saved = phi_q, phi_k, v, bias, far, z, den, grad
            cells = _cells(options)
            grads = batched.attend_backward(*saved, (height, width), causal, bias_grad, cells, log_den_grad)
            return tuple(v.new_empty(0) if x is None else x.contiguous() for x in grads)
        small = den.dtype == torch.float32 and positive and bool((den < _SMALL_IN_BACKWARD).any())
        peaked = None if small or den.dtype != torch.float32 else _peaked_heads(bias, far, causal)
        if peaked is not None and not peaked.all():
            return _backward_by_heads((phi_q, phi_k, v, bias, far), grad, options, bias_grad, peaked, log_den_grad)
        if small or peaked is not None:
            wide = _double(phi_q, phi_k, v, bias, far)
            z, den = attend(*wide, *options)
            others = *_with_bias_grad(options, bias_grad), *_double(log_den_grad)
            grads = attend_backward(*wide, z, den, grad.double(), *others)
            largest = torch.finfo(torch.float32).max  # a zero key below a steep bias has a gradient beyond float32
            return tuple(x.clamp(-largest, largest).float() for x in grads)
        # z = num/den: the gradient of num is g/den, that of den is -(g·z)/den
        scaled = grad / den.unsqueeze(-1)
        if not z.sum().isfinite():
            phi_q, phi_k, v, z, scaled = _finite_backward(phi_q, phi_k, v, z, grad, scaled, causal)
        grad = torch.cat([scaled, -(scaled * z).sum(-1, keepdim=True)], dim=-1)  # B, K, N, D+1
        if log_den_grad is not None:
            grad[..., -1] += log_den_grad / den
        inputs = phi_q, phi_k, v, bias, far
        grads = _backward(inputs, options, grad, bias_grad, log_den_grad)
    return tuple(v.new_empty(0) if x is None else x.contiguous() for x in grads)


def _is_batched(v: torch.Tensor, backend: str) -> bool:
    """Off the CPU nothing is read on the host: one dense or tiled product stands in for those that look at the bias."""
    if v.device.type == 'cpu':
        return False
    algorithm = BACKENDS[backend].run if backend != 'auto' else None
    return algorithm is None or (isinstance(algorithm, Product) and algorithm.batched)


def _peaked_heads(bias: torch.Tensor | None, far: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
    """Heads whose float32 gradients would be rounding; on the CPU only, as others may be far slower in float64."""
    return None if bias is None or bias.device.type != 'cpu' else peaked_heads(bias, far, causal)


def _backward_by_heads(
    inputs: Tensors,
    grad: torch.Tensor,
    options: Options,
    bias_grad: bool,
    peaked: torch.Tensor,
    log_den_grad: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of peaked heads and of all others apart: float64 is for the former alone, few of a trained table."""
    dims = 1, 1, 1, 0, 0  # of heads, in (B, K, N, ·) and in tables (K, ...)
    parts = []
    for heads in (peaked.nonzero()[:, 0], (~peaked).nonzero()[:, 0]):
        some = [x if x is None else x.index_select(dim, heads) for x, dim in zip(inputs, dims)]
        # forward again: a denominator has a factor per row that depends on all heads of a call
        saved = *some, *attend(*some, *options), grad[:, heads]
        of_den = None if log_den_grad is None else log_den_grad[:, heads]
        parts.append(attend_backward(*saved, *_with_bias_grad(options, bias_grad), of_den))
    order = torch.cat([peaked.nonzero()[:, 0], (~peaked).nonzero()[:, 0]]).argsort()
    return tuple(
        x if x.numel() == 0 else torch.cat([x, y], dim).index_select(dim, order) for x, y, dim in zip(*parts, dims)
    )


def _finite_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    grad: torch.Tensor,
    scaled: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """Takes tokens out that are not finite, if nobody asks for their outputs: then other gradients are finite."""
    phi_q = phi_q.masked_fill(~phi_q.isfinite().all(-1, keepdim=True), 0)
    tokens = without_nonfinite(phi_k, v) if causal else None
    if tokens is not None:
        phi_k, v = tokens.phi_k, tokens.v
    return phi_q, phi_k, v, z.masked_fill(grad == 0, 0), scaled.masked_fill(grad == 0, 0)


@attend_backward.register_fake
def _(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    z: torch.Tensor,
    den: torch.Tensor,
    grad: torch.Tensor,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    backend: str,
    bias_grad: bool,
    *args: Any,
) -> tuple[torch.Tensor, ...]:
    return tuple(
        v.new_empty(0) if x is None or not wanted else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, wanted in ((phi_q, True), (phi_k, True), (v, True), (bias, bias_grad), (far, bias_grad))
    )


def _forward(tensors: Tensors, options: Options) -> Sums:
    inputs, case = _case(tensors, options)
    algorithm, dtype = product(options[4], case, inputs)
    return algorithm.forward(inputs, case.grid, case.causal, dtype)


def _backward(
    tensors: Tensors, options: Options, grad: torch.Tensor, bias_grad: bool, log_den_grad: torch.Tensor | None
) -> Tensors:
    inputs, case = _case(tensors, options)
    algorithm, dtype = product(options[4], case, inputs)
    more: Tensors = ()
    if algorithm.uses_bias_total:
        # a constant added to all biases is added to log den, and changes nothing else
        more = (None if log_den_grad is None else log_den_grad.to(dtype).sum((0, 2)),)
    *grads, of_bias = algorithm.backward(inputs, case.grid, case.causal, dtype, grad, bias_grad, *more)
    return *grads, *of_bias


def _case(tensors: Tensors, options: Options) -> tuple[Inputs, Case]:
    phi_q, phi_k, v, table, far = tensors
    height, width, causal, positive = options[:4]
    bias = None if table is None else Bias(table, far, _cells(options))
    return Inputs(phi_q, phi_k, v, bias), Case.of(phi_q, v, bias, (height, width), causal, positive)


def _cells(options: Options) -> Grid | None:
    return options[5:] if options[5] else None


def _with_bias_grad(options: Options, bias_grad: bool) -> tuple:
    """The arguments of `attend_backward` after its tensors: cells came last."""
    return *options[:5], bias_grad, *options[5:]


def _double(*tensors: torch.Tensor | None) -> Tensors:
    return tuple(None if x is None else x.double() for x in tensors)
