"""Products (ΦqΦkᵀ ∘ C) V by FFT: Σ_m φq_m · T(φk_m ⊗ v), T (block-)Toeplitz. O(M·E·N log N). docs/math.md, "FFT".

# B batch, K heads, N tokens, M features, E value columns, H×W grid, P×Q padded grid, Q' = Q/2+1
# conj_physical throughout: the lazy conj() is lost inside a custom op that AOT autograd runs (torch 2.15).
# A chunk is g of the B·K heads × f features × e columns; tokens come last: (g, f, e, H, W).
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .. import toeplitz
from ..bias import Bias, whole_table, whole_table_backward
from ..offsets import is_wide
from . import direct, linear
from .fft_forms import CAUSAL_BLOCK, Halves, WholeGrid, forms
from .interface import Backend, Case, Gradients, Grid, Inputs, Product, Sums, not_between_cells

# Cost of one point of one channel of an FFT, per log2 of its size, in multiply-adds of `direct`, on two CPU cores:
# 8 to 9.7 for sizes that are powers of two, but for a factor 3 (`python -m benchmarks.attention --constants`), 12 to 13
# for others and for sequences (`nprf_vit.doctor`, benchmarks.length). The geometric mean of 8.5 and 13, so that either
# is at most 1.25 times off. On CUDA from the roofline of an A100, not measured: 48 bytes per point at 2 TB/s beside the
# kernels of `fused` on tensor cores (docs/backends.md).
FFT_POINTS = {'cpu': 10.5, 'cuda': 180.0}
# Rounding of one product, per log2 of its length, in units in the last place of ‖c‖₂·‖u‖₂. Searched for the worst:
# 0.47 from 64 tokens up, 0.87 below (tests/ops/test_fft_range.py holds it).
_ROUNDING = 1.0
_TOLERANCE = {torch.float32: 4e-4, torch.float64: 4e-9}


def forward(inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype) -> Sums:
    """Numerators and denominators; the working dtype is `working_dtype`'s."""
    phi_q, phi_k, v, _ = inputs
    args, table = [x.to(dtype) for x in (phi_q, phi_k, linear.with_ones(v))], _table(inputs, grid).to(dtype)
    c = _normalized(table, causal)
    if causal:
        out = _blocks_forward(phi_q.to(dtype), phi_k.to(dtype), v.to(dtype), table)
    else:
        c, mean = _split(c)
        out = linear.product(*args, False).mul_(mean)
    *sources, acc = (_tokens_last(x, causal) for x in (*args, out))
    for form in forms(c, grid, causal):
        _accumulate(form, *sources, acc)
    return linear.split(_tokens_first(acc, out.shape).to(v.dtype))


def backward(
    inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype, grad: torch.Tensor, bias_grad: bool
) -> Gradients:
    """Gradients; four transforms per channel instead of two."""
    phi_q, phi_k, v, bias = inputs
    assert bias is not None  # `_why_not`
    args, table = [x.to(dtype) for x in (phi_q, phi_k, linear.with_ones(v), grad)], _table(inputs, grid).to(dtype)
    c = smooth = _normalized(table, causal)
    grads: tuple[torch.Tensor, ...]
    if causal:
        grads, d_table = _blocks_backward(*args, table, bias_grad)
    else:
        smooth, mean = _split(c)
        grads = linear.product_backward(*args[:3], args[3] * mean, False)
        d_table = torch.zeros_like(c) if bias_grad else None
    sources, outputs = ([_tokens_last(x, causal) for x in xs] for xs in (args, grads))
    d_c = torch.zeros_like(c) if bias_grad else None
    for form in forms(smooth, grid, causal):
        _accumulate_gradients(form, sources, outputs, d_c)
    if bias_grad:
        d_table = (d_table + c * d_c).to(v.dtype)
    d_q, d_k, d_v = (_tokens_first(x, y.shape).to(v.dtype) for x, y in zip(outputs, grads))
    return Gradients(d_q, d_k, d_v[..., :-1], whole_table_backward(d_table, bias, grid))


def _table(inputs: Inputs, grid: Grid) -> torch.Tensor:
    assert inputs.bias is not None  # `_why_not`
    return whole_table(inputs.bias, grid)


def _working_dtype(inputs: Inputs, grid: Grid, causal: bool) -> torch.dtype | None:
    return working_dtype(_table(inputs, grid), causal, inputs.v.dtype)


def working_dtype(bias: torch.Tensor, causal: bool, dtype: torch.dtype) -> torch.dtype | None:
    """The narrowest dtype whose FFT holds the tolerance for this bias, or None if none does.

    With weights c ≥ c_min and any u, the FFT's error ε·‖c‖₂·‖u‖₂ is at most ε·‖c‖₂/c_min of Σ_j c_ij|u_j|, whatever the
    positive features and the values are. Without causality c's mean goes through plain sums and ‖c - mean‖₂ counts.
    """
    visible = bias[..., : (bias.shape[-1] + 1) // 2] if causal else bias
    if visible.shape[-1] * visible.shape[-2] == 1:
        return dtype
    if causal and is_wide(visible):
        return None  # `direct`, which does the blocks on the diagonal, would scale each row by itself
    c = (visible.double() - visible.double().amax((-2, -1), keepdim=True)).exp()
    size = c if causal else c - c.mean((-2, -1), keepdim=True)
    ratio = (size.square().sum((-2, -1)).sqrt() / c.amin((-2, -1))).amax().item()
    for working in (torch.float32, torch.float64):
        if working.itemsize < dtype.itemsize:
            continue
        unit = torch.finfo(working).eps / 2
        if ratio * unit * _ROUNDING * math.log2(2 * bias[0].numel()) <= _TOLERANCE[dtype]:
            return working
    return None


def _accumulate(
    form: WholeGrid | Halves, phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, acc: torch.Tensor
) -> None:
    for g, f, e, spectrum in _chunks(form, phi_k, v):
        u = form.source_transform(form.source(phi_k[g, f, None]), form.source(v[g, None, e]))  # g, f, e, Q', P
        y = form.target_inverse(u.mul_(spectrum))
        y = y.mul_(form.target(phi_q[g, f, None]))
        form.target(acc[g, e]).add_(y.sum(1) if y.shape[1] > 1 else y[:, 0])


def _accumulate_gradients(
    form: WholeGrid | Halves, inputs: list[torch.Tensor], outputs: list[torch.Tensor], d_c: torch.Tensor | None
) -> None:
    phi_q, phi_k, v, grad = inputs
    d_q, d_k, d_v = outputs
    cross = torch.zeros_like(form.spectrum)
    for g, f, e, spectrum in _chunks(form, phi_k, v):
        q, w = form.target(phi_q[g, f, None]), form.target(grad[g, None, e])
        k, value = form.source(phi_k[g, f, None]), form.source(v[g, None, e])
        source, target = form.source_transform(k, value), form.target_transform(q, w)  # g, f, e, Q', P
        if d_c is not None:
            for i, row in enumerate(form.correlation(target, source), start=g.start):
                cross[i % cross.shape[0]] += row
        y = form.target_inverse(source.mul_(spectrum))
        form.target(d_q[g, f]).add_((y * w).sum(2))
        x = form.source_inverse(target.mul_(torch.conj_physical(spectrum)))
        form.source(d_k[g, f]).add_((x * value).sum(2))
        form.source(d_v[g, e]).add_((x * k).sum(1))
    if d_c is not None:
        form.add_offsets(d_c, cross)


def _chunks(
    form: WholeGrid | Halves, phi_k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[slice, slice, slice, torch.Tensor]]:
    heads, features, columns = phi_k.shape[0], phi_k.shape[1], v.shape[1]
    channels = max(1, form.chunk_bytes // (2 * v.dtype.itemsize * form.cells))
    e_step = math.ceil(columns / math.ceil(columns / channels))
    f_step = min(features, max(1, channels // columns))
    g_step = min(heads, max(1, channels // (columns * features)))
    for g in range(0, heads, g_step):
        g_end = min(g + g_step, heads)
        which = torch.arange(g, g_end, device=v.device) % form.spectrum.shape[0]
        spectrum = form.spectrum[which][:, None, None]  # g, 1, 1, Q', P
        for f in range(0, features, f_step):
            for e in range(0, columns, e_step):
                yield slice(g, g_end), slice(f, min(f + f_step, features)), slice(e, min(e + e_step, columns)), spectrum


def _normalized(bias: torch.Tensor, causal: bool) -> torch.Tensor:
    """c = exp(b - max) (K, 2H-1, 2W-1), zero where the key comes after the query of a causal sequence."""
    if not causal:
        return (bias - bias.amax((1, 2), keepdim=True)).exp()
    n = (bias.shape[2] + 1) // 2
    c = torch.zeros_like(bias)
    c[:, :, :n] = (bias[:, :, :n] - bias[:, :, :n].amax((1, 2), keepdim=True)).exp()
    return c


def _split(c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = c.mean((1, 2), keepdim=True)  # K, 1, 1
    return c - mean, mean


def _blocks_forward(phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The causal product inside blocks of consecutive tokens, dense: (B, K, N, D+1)."""
    blocks, local, scale, size = _blocks((phi_q, phi_k, v), bias)
    num, den = direct.forward(Inputs(*blocks, Bias(local)), (1, size), True, v.dtype)
    return _unblock(torch.cat([num, den.unsqueeze(-1)], dim=-1) * scale, v.shape)


def _blocks_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    bias: torch.Tensor,
    bias_grad: bool,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    blocks, local, scale, size = _blocks((phi_q, phi_k, v[..., :-1], grad), bias)
    inputs = Inputs(*blocks[:3], Bias(local))
    grads = direct.backward(inputs, (1, size), True, v.dtype, blocks[3] * scale, bias_grad)
    d_bias = None
    if bias_grad:
        d_bias = torch.zeros_like(bias)
        centre = bias.shape[2] // 2
        d_bias[:, :, centre - size + 1 : centre + size] = grads.bias.table
    d_v = F.pad(grads.v, (0, 1))  # nobody asks for the gradient of the ones
    pairs = zip((grads.phi_q, grads.phi_k, d_v), (phi_q, phi_k, v))
    return tuple(_unblock(x, y.shape) for x, y in pairs), d_bias


def _blocks(
    tensors: tuple[torch.Tensor, ...], bias: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, int]:
    """Blocks as batch items (B·blocks, K, size, ·), the table of their offsets, and its scale in the whole table."""
    n = tensors[0].shape[2]
    size = min(CAUSAL_BLOCK, n)
    padded = [F.pad(x, (0, 0, 0, -n % size)) for x in tensors]
    blocks = [x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1) for x in padded]
    local = bias[:, :, n - size : n + size - 1]  # K, 1, 2·size-1
    scale = (local[:, :, :size].amax((1, 2), keepdim=True) - bias[:, :, :n].amax((1, 2), keepdim=True)).exp()
    return blocks, local, scale, size


def _unblock(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return x.unflatten(0, (shape[0], -1)).transpose(1, 2).flatten(2, 3)[:, :, : shape[2]]


def _tokens_last(x: torch.Tensor, causal: bool) -> torch.Tensor:
    """(B, K, N, ·) -> (B·K, ·, N); causal sequences are padded with zeros to whole segments."""
    x = x.flatten(0, 1).transpose(1, 2)
    missing = 0
    if causal:
        segment = CAUSAL_BLOCK
        while segment < x.shape[-1]:
            segment *= 2
        missing = segment - x.shape[-1]
    return F.pad(x, (0, missing)).contiguous() if missing else x.contiguous()


def _tokens_first(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return x[..., : shape[2]].transpose(1, 2).reshape(shape)


def _why_not(case: Case) -> str | None:
    return not_between_cells(case) if case.has_bias else 'there is no bias'


def fft_point(device: str) -> float:
    """Cost of a point on a type of device; all accelerators are taken for CUDA's."""
    return FFT_POINTS.get(device, FFT_POINTS['cuda'])


def causal_points(n: int) -> float:
    """Σ L·log₂ L over the transforms that a channel of a causal sequence goes through."""
    levels = max(0, math.ceil(math.log2(max(1, n / CAUSAL_BLOCK))))
    return sum(n * math.log2(2 * CAUSAL_BLOCK << i) for i in range(levels))


def _cost(case: Case) -> float | None:
    """M(D+1) channels of a P×Q transform pair; causal, one of half the length per level plus the dense blocks."""
    channels, n, point = case.m * (case.d + 1), case.n, fft_point(case.device)
    if case.causal:
        return point * channels * causal_points(n) + n * CAUSAL_BLOCK * (case.m + case.d + 1) * 0.5
    padded = toeplitz.padded_size(*case.grid)
    points = padded[0] * padded[1]
    return point * channels * points * math.log2(max(2, points))


def log_scale(inputs: Inputs, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """(K, 1): one maximum per head, see `_normalized`."""
    return _table(inputs, grid).amax((1, 2))[:, None]


BACKEND = Backend('fft', _why_not, _cost, Product(forward, backward, _working_dtype, log_scale=log_scale))
