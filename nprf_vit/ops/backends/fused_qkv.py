"""Attention from the packed projection: features of queries and keys and the attention, gradients packed likewise.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W); a sequence is a 1×N grid

q, k and v are read from qkv (B, N, 3, K, D) by strides and z is written as (B, N, K, D): no copy on either side. Three
launches forward, seven backward.
"""

from typing import Any

import torch

from ..bias import Bias
from .fused import (
    attend,
    attend_partial,
    bias_gradients,
    device_of,
    fake_bias_gradients,
    problem,
    rows,
    saved,
    statistics,
)
from .fused_check import is_trusted
from .fused_plain import attend_plain, attend_plain_backward, features_plain, features_plain_backward
from .fused_support import feature_precision, preferred, refuse_second_derivatives, why_not
from .interface import Backend, Case, Whole, by_name_only


def _unpacked(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views (B, K, N, D) of the queries, keys and values."""
    return rows(qkv).permute(2, 0, 3, 1, 4).unbind(0)


@torch.library.custom_op('nprf_vit::fused_qkv', mutates_args=())
def fused_qkv(
    qkv: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    height: int,
    width: int,
    causal: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """Attention (B, N, K, D) of normalized positive features of packed projections qkv (B, N, 3, K, D), w (K, M, D).

    Also what the backward needs: phi_q, phi_k, den, shift, log_c, heads, state.
    """
    from ..kernels.launch_features import run_features
    from ..kernels.launch_forward import run_forward

    (q, k, v), w = _unpacked(qkv), w.contiguous()
    z = torch.empty_like(qkv[:, :, 0], memory_format=torch.contiguous_format)
    with device_of(v):
        table, beyond, p = problem(v, bias, far, height, width, causal, True)
        if not is_trusted(v, w.shape[1], p):
            phi_q, phi_k = features_plain(q, k, w)
            z.copy_(attend_plain(phi_q, phi_k, v, bias, far, height, width, causal, True).z.transpose(1, 2))
            return z, phi_q, phi_k, *statistics(phi_q, v, bias, far, height, width, causal)
        phi_q, phi_k = run_features(q, k, w, feature_precision())
        out = run_forward(phi_q, phi_k, v, table, beyond, p, z.transpose(1, 2))
    return z, phi_q, phi_k, out.den, out.shift, out.tables.log_c, out.tables.heads, out.tables.state


@fused_qkv.register_fake
def _(
    qkv: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    height: int,
    width: int,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    q, _, v = _unpacked(qkv)
    phi_q, phi_k = (v.new_empty(*v.shape[:3], w.shape[1], dtype=torch.float32) for _ in range(2))
    z = torch.empty_like(qkv[:, :, 0], memory_format=torch.contiguous_format)
    return z, phi_q, phi_k, *statistics(phi_q, v, bias, far, height, width, causal)


@torch.library.custom_op('nprf_vit::fused_qkv_backward', mutates_args=())
def fused_qkv_backward(
    qkv: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    z: torch.Tensor,
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    den: torch.Tensor,
    shift: torch.Tensor,
    log_c: torch.Tensor,
    heads: torch.Tensor,
    state: torch.Tensor,
    grad: torch.Tensor,
    height: int,
    width: int,
    causal: bool,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of qkv, packed as it is, of bias and of far; the last two empty where there are none."""
    from ..kernels.launch_backward import run_backward
    from ..kernels.launch_features import run_features_backward

    (q, k, v), w, grad = _unpacked(qkv), w.contiguous(), rows(grad).transpose(1, 2)
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    d_q, d_k, d_v = _unpacked(d_qkv)
    with device_of(v):
        table, beyond, p = problem(v, bias, far, height, width, causal, True)
        if not is_trusted(v, w.shape[1], p):
            plain = attend_plain_backward(phi_q, phi_k, v, bias, far, grad, height, width, causal, True, bias_grad)
            for x, phi, d_phi, d_x in ((q, phi_q, plain[0], d_q), (k, phi_k, plain[1], d_k)):
                d_x.copy_(features_plain_backward(x, w, phi, d_phi))
            d_v.copy_(plain[2])
            return d_qkv, *plain[3:]
        forward = saved(z.transpose(1, 2), den, shift, log_c, heads, state)
        grads = run_backward(phi_q, phi_k, v, table, beyond, p, forward, grad, d_v, bias_grad)
        d_phi_q, d_phi_k, d_bias, d_far = grads
        run_features_backward(q, k, w, phi_q, phi_k, d_phi_q, d_phi_k, d_q, d_k, feature_precision())
        return d_qkv, *bias_gradients(d_bias, d_far, v, far, bias_grad)


@fused_qkv_backward.register_fake
def _(
    qkv: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    z: torch.Tensor,
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    den: torch.Tensor,
    shift: torch.Tensor,
    log_c: torch.Tensor,
    heads: torch.Tensor,
    state: torch.Tensor,
    grad: torch.Tensor,
    height: int,
    width: int,
    causal: bool,
    bias_grad: bool,
) -> tuple[torch.Tensor, ...]:
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return d_qkv, *fake_bias_gradients(qkv, bias, far, bias_grad)


def _save_qkv(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.height, ctx.width, ctx.causal = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate_qkv(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    bias, far = ctx.needs_input_grad[2:4]
    d_qkv, d_bias, d_far = fused_qkv_backward(*ctx.saved_tensors, grad, ctx.height, ctx.width, ctx.causal, bias or far)
    return d_qkv, None, d_bias if bias else None, d_far if far else None, None, None, None


fused_qkv.register_autograd(_differentiate_qkv, setup_context=_save_qkv)
fused_qkv_backward.register_autograd(refuse_second_derivatives)


def attend_packed(qkv: torch.Tensor, w: torch.Tensor, bias: Bias | None, case: Case) -> torch.Tensor:
    """(B, N, K, D) in qkv's dtype."""
    table, far = (bias.table, bias.far) if bias is not None else (None, None)
    return fused_qkv(qkv, w, table, far, *case.grid, case.causal)[0]


BACKEND = Backend('fused', why_not, by_name_only, Whole(attend, attend_packed, preferred, attend_partial))
