"""The opaque op that autograd, compile and export see: normalization, rescue and dispatch to one algorithm.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W); a sequence is a 1×N grid
"""

import torch

from . import direct, fft, linear, window
from .cost import choose_backend
from .offsets import extend_table, extend_table_backward
from .precision import without_autocast

_ALGORITHMS = {'direct': direct, 'fft': fft, 'linear': linear}
# Below this a float32 denominator has lost digits to underflow and the product is repeated in float64.
_SMALL = 1e-30


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its denominators (B, K, N). Opaque, because backends look at the bias's values."""
    options = height, width, causal, positive, backend
    with without_autocast(v):
        num, den = _forward(phi_q, phi_k, v, bias, far, (height, width), causal, backend)
        if not positive:
            return num / den.unsqueeze(-1), den.contiguous()
        small = den < _SMALL
        den = den.clamp(min=torch.finfo(den.dtype).tiny).contiguous()
        z = num.div_(den.unsqueeze(-1)).contiguous()
        if den.dtype == torch.float32 and small.any():
            # only the rows that need it: a causal token may not change because a later one underflows
            wide = attend(*_double(phi_q, phi_k, v, bias, far), *options)[0].float()
            z = torch.where(small.unsqueeze(-1), wide, z)
        return z, den


@attend.register_fake
def _(phi_q, phi_k, v, bias, far, height, width, causal, positive, backend):
    return torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(v.shape[:-1])


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of phi_q, phi_k, v, bias and far; those of bias and far empty where there are none."""
    options = height, width, causal, positive, backend
    with without_autocast(v):
        if positive and den.dtype == torch.float32 and (den < _SMALL).any():  # amin would be NaN if any row is
            inputs = _double(phi_q, phi_k, v, bias, far)
            z, den = attend(*inputs, *options)
            return tuple(x.float() for x in attend_backward(*inputs, z, den, grad.double(), *options, bias_grad))
        if positive:  # a row that sees no key of any weight is zero, whatever its inputs: no gradient
            den = den.masked_fill(den <= torch.finfo(den.dtype).tiny, torch.inf)
        # z = num/den: the gradient of num is g/den, that of den is -(g·z)/den
        scaled = grad / den.unsqueeze(-1)
        grad = torch.cat([scaled, -(scaled * z).sum(-1, keepdim=True)], dim=-1)  # B, K, N, D+1
        grads = _backward(phi_q, phi_k, v, bias, far, (height, width), causal, backend, grad, bias_grad)
    return tuple(v.new_empty(0) if x is None else x.contiguous() for x in grads)


@attend_backward.register_fake
def _(phi_q, phi_k, v, bias, far, z, den, grad, height, width, causal, positive, backend, bias_grad):
    return tuple(
        v.new_empty(0) if x is None or not wanted else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, wanted in ((phi_q, True), (phi_k, True), (v, True), (bias, bias_grad), (far, bias_grad))
    )


def _save(ctx, inputs, output):
    *tensors, ctx.height, ctx.width, ctx.causal, ctx.positive, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * 10
    options = ctx.height, ctx.width, ctx.causal, ctx.positive, ctx.backend
    bias, far = ctx.needs_input_grad[3:5]
    *grads, d_bias, d_far = attend_backward(*ctx.saved_tensors, grad, *options, bias or far)
    return *grads, d_bias if bias else None, d_far if far else None, None, None, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)


def _forward(phi_q, phi_k, v, bias, far, grid, causal, backend):
    backend = _resolve(backend, phi_q, v, bias, far, grid, causal)
    if backend == 'window':
        return window.forward(phi_q, phi_k, v, bias, far, grid, causal)
    table = bias if far is None else extend_table(bias, far, *grid)
    return _ALGORITHMS[backend].forward(phi_q, phi_k, v, table, grid, causal)


def _backward(phi_q, phi_k, v, bias, far, grid, causal, backend, grad, bias_grad):
    backend = _resolve(backend, phi_q, v, bias, far, grid, causal)
    if backend == 'window':
        return window.backward(phi_q, phi_k, v, bias, far, grid, causal, grad, bias_grad)
    table = bias if far is None else extend_table(bias, far, *grid)
    *grads, d_bias = _ALGORITHMS[backend].backward(phi_q, phi_k, v, table, grid, causal, grad, bias_grad)
    d_far = None
    if far is not None and bias_grad:
        d_bias, d_far = extend_table_backward(d_bias, bias, *grid)
    return *grads, d_bias, d_far


def _resolve(backend, phi_q, v, bias, far, grid, causal):
    """The algorithm that runs: the cost model's for 'auto', and `direct` where `window` would drown in rounding."""
    if backend == 'auto':
        radius = None if far is None else (bias.shape[1] // 2, bias.shape[2] // 2)
        backend = choose_backend(grid, phi_q.shape[-1], v.shape[-1], causal, bias is not None, radius)
    if backend == 'window' and window.working_dtype(bias, far, grid, causal, v.dtype) is None:
        backend = 'direct'
    return backend


def _double(*tensors):
    return tuple(None if x is None else x.double() for x in tensors)
