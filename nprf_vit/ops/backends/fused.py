"""Attention in Triton kernels (ops/kernels), for CUDA, ROCm, and CPU tensors in Triton's interpreter.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W); a sequence is a 1×N grid

Opaque, because the first call on a GPU checks the kernels against plain PyTorch and may hand over to it. Triton is
imported by the first call only.
"""

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch

from ..checks import check_tokens
from .fused_check import is_trusted
from .fused_plain import attend_plain, attend_plain_backward
from .fused_support import precision, refuse_second_derivatives
from .interface import Case, Inputs, Partial

if TYPE_CHECKING:
    from ..kernels.launch import Problem
    from ..kernels.launch_forward import Forward

Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# Tokens of a part of the linear term's sums, which every tile adds up again, and how many parts there are at most.
_TOKENS_PER_PART, _PARTS = 4096, 8


def rows(x: torch.Tensor) -> torch.Tensor:
    """x with its last dimension in one run of memory, which is all that the kernels ask of strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the tensors' is."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def problem(
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, 'Problem']:
    """The table and far that the kernels need, and what a call is about."""
    from ..kernels.launch import Problem

    check_tokens(v.shape[2], v.shape[2], height, width, apart=False)
    kind = _kind(bias, far, height, width)
    radius = (0, 0) if bias is None else (bias.shape[1] // 2, bias.shape[2] // 2)
    table = None if bias is None else bias.contiguous()
    beyond = far.contiguous() if far is not None and kind == 'window' else None
    parts = _parts(height * width, kind, causal)
    p = Problem((height, width), kind, radius, causal, positive, precision(v.dtype), parts)
    return table, beyond, p


def _kind(bias: torch.Tensor | None, far: torch.Tensor | None, height: int, width: int) -> str:
    if bias is None:
        return 'none'
    # a window that is the table of the grid leaves nothing beyond it
    covered = bias.shape[1] == 2 * height - 1 and bias.shape[2] == 2 * width - 1
    return 'full' if far is None or covered else 'window'


def _parts(n: int, kind: str, causal: bool) -> int:
    return 0 if causal or kind == 'full' else min(_PARTS, (n + _TOKENS_PER_PART - 1) // _TOKENS_PER_PART)


def statistics(
    phi_q: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    height: int,
    width: int,
    causal: bool,
) -> Statistics:
    """Memory of den, shift, log_c, heads and state, unwritten: phi_q (B, K, N, M), v (B, K, N, D)."""
    (b, k, n, m), d = phi_q.shape, v.shape[-1]
    entries, tables = (0, 0) if bias is None else (bias.shape[1] * bias.shape[2], k)
    parts = _parts(n, _kind(bias, far, height, width), causal)
    shapes = (b, k, n), (b, k, n), (k, entries), (tables, 4), (b * k, parts, m, d + 1)
    den, shift, log_c, heads, state = (v.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return den, shift, log_c, heads, state


def saved(
    z: torch.Tensor,
    den: torch.Tensor,
    shift: torch.Tensor,
    log_c: torch.Tensor,
    heads: torch.Tensor,
    state: torch.Tensor,
) -> 'Forward':
    """What the forward left for the backward; c itself is not needed again."""
    from ..kernels.launch_forward import Forward, Tables

    return Forward(z, den, shift, Tables(log_c, log_c, heads, state, state.shape[1]))


def bias_gradients(
    d_bias: torch.Tensor | None, d_far: torch.Tensor | None, v: torch.Tensor, far: torch.Tensor | None, bias_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of bias and far as an op returns them: empty for none, zero for a far beyond a whole table."""
    if far is not None and bias_grad and d_far is None:
        d_far = torch.zeros_like(far)
    of_bias, of_far = (v.new_empty(0, dtype=torch.float32) if x is None else x for x in (d_bias, d_far))
    return of_bias, of_far


def fake_bias_gradients(
    v: torch.Tensor, bias: torch.Tensor | None, far: torch.Tensor | None, bias_grad: bool
) -> tuple[torch.Tensor, ...]:
    return tuple(
        v.new_empty(0, dtype=torch.float32)
        if x is None or not bias_grad
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (bias, far)
    )


@torch.library.custom_op('nprf_vit::fused', mutates_args=())
def fused(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention (B, K, N, D) in v's dtype, and what the backward needs: den, shift, log_c, heads, state."""
    from ..kernels.launch_forward import run_forward

    phi_q, phi_k, v = (rows(x) for x in (phi_q, phi_k, v))
    z = torch.empty_like(v, memory_format=torch.contiguous_format)
    with device_of(v):
        table, beyond, p = problem(v, bias, far, height, width, causal, positive)
        if not is_trusted(v, phi_q.shape[-1], p):
            plain = attend_plain(phi_q, phi_k, v, bias, far, height, width, causal, positive)
            den, _, *others = statistics(phi_q, v, bias, far, height, width, causal)
            den.copy_(plain.den.masked_fill(plain.den.isinf(), 0))
            z.copy_(plain.z)
            shift = (plain.log_scale - _largest_bias(bias, beyond, v)) / math.log(2.0)
            return z, den, shift.expand_as(den).contiguous(), *others
        out = run_forward(phi_q, phi_k, v, table, beyond, p, z)
    return z, out.den, out.shift, out.tables.log_c, out.tables.heads, out.tables.state


@fused.register_fake
def _(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
) -> tuple[torch.Tensor, ...]:
    z = torch.empty_like(v, memory_format=torch.contiguous_format)
    return z, *statistics(phi_q, v, bias, far, height, width, causal)


@torch.library.custom_op('nprf_vit::fused_backward', mutates_args=())
def fused_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    z: torch.Tensor,
    den: torch.Tensor,
    shift: torch.Tensor,
    log_c: torch.Tensor,
    heads: torch.Tensor,
    state: torch.Tensor,
    grad: torch.Tensor,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    bias_grad: bool,
    log_den_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of phi_q, phi_k, v, bias and far; those of bias and far empty where there are none."""
    from ..kernels.launch_backward import run_backward

    phi_q, phi_k, v, grad = (rows(x) for x in (phi_q, phi_k, v, grad))
    with device_of(v):
        table, beyond, p = problem(v, bias, far, height, width, causal, positive)
        if not is_trusted(v, phi_q.shape[-1], p):
            options = height, width, causal, positive, bias_grad
            return attend_plain_backward(phi_q, phi_k, v, bias, far, grad, *options, log_den_grad)
        d_v = torch.empty_like(v, memory_format=torch.contiguous_format)
        forward = saved(z, den, shift, log_c, heads, state)
        tensors = phi_q, phi_k, v, table, beyond
        d_q, d_k, d_bias, d_far = run_backward(*tensors, p, forward, grad, d_v, bias_grad, log_den_grad)
        return d_q, d_k, d_v, *bias_gradients(d_bias, d_far, v, far, bias_grad)


@fused_backward.register_fake
def _(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    z: torch.Tensor,
    den: torch.Tensor,
    shift: torch.Tensor,
    log_c: torch.Tensor,
    heads: torch.Tensor,
    state: torch.Tensor,
    grad: torch.Tensor,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    bias_grad: bool,
    log_den_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (phi_q, phi_k, v))
    return *grads, *fake_bias_gradients(v, bias, far, bias_grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.height, ctx.width, ctx.causal, ctx.positive = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(
    ctx: Any, grad: torch.Tensor | None, den_grad: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    if grad is None and den_grad is None:
        return (None,) * 9
    tensors = ctx.saved_tensors  # once: gradient checkpointing frees what is read
    z, den = tensors[5:7]
    options = ctx.height, ctx.width, ctx.causal, ctx.positive
    bias, far = ctx.needs_input_grad[3:5]
    grad = torch.zeros_like(z) if grad is None else grad
    log_den_grad = None if den_grad is None else (den_grad * den).contiguous()
    *grads, d_bias, d_far = fused_backward(*tensors, grad, *options, bias or far, log_den_grad)
    return *grads, d_bias if bias else None, d_far if far else None, None, None, None, None


fused.register_autograd(_differentiate, setup_context=_save)
fused_backward.register_autograd(refuse_second_derivatives)


def attend(inputs: Inputs, case: Case) -> torch.Tensor:
    """(B, K, N, D) in v's dtype."""
    phi_q, phi_k, v, bias = inputs
    table, far = (bias.table, bias.far) if bias is not None else (None, None)
    return fused(phi_q, phi_k, v, table, far, *case.grid, case.causal, case.positive)[0]


def attend_partial(inputs: Inputs, case: Case) -> Partial:
    """With the logarithms of the denominators; the gradient of den, by autograd, becomes theirs in `_differentiate`."""
    phi_q, phi_k, v, bias = inputs
    table, far = (bias.table, bias.far) if bias is not None else (None, None)
    z, den, shift, *_ = fused(phi_q, phi_k, v, table, far, *case.grid, False, case.positive)
    left_out = shift * math.log(2.0)
    if table is not None:
        beyond = far if _kind(table, far, *case.grid) == 'window' else None
        left_out = left_out + _largest_bias(table.detach(), beyond, v)
    empty = den == 0
    log_den = torch.where(empty, -torch.inf, torch.where(empty, 1, den).abs().log() + left_out)
    return Partial(z, log_den, None if case.positive else den.detach().sign())


def _largest_bias(bias: torch.Tensor | None, far: torch.Tensor | None, v: torch.Tensor) -> torch.Tensor:
    """(K, 1): what `prepare` takes out of a head's biases."""
    if bias is None:
        return v.new_zeros((), dtype=torch.float32)
    top = bias.amax((1, 2))
    return (top if far is None else torch.maximum(top, far.detach()))[:, None]
