"""Products (ΦqΦkᵀ ∘ C) V by FFT: Σ_m φq_m · T(φk_m ⊗ v), T (block-)Toeplitz. O(M·E·N log N). docs/math.md, "FFT".

# B batch, K heads, N tokens, M features, E value columns, H×W grid, P×Q padded grid, Q' = Q/2+1
# conj_physical throughout: the lazy conj() is lost inside a custom op that AOT autograd runs (torch 2.15).
# A chunk is g of the B·K heads × f features × e columns; tokens come last: (g, f, e, H, W).
"""

import math
from collections.abc import Iterator

import torch

from nprf_vit.ops import toeplitz
from nprf_vit.ops.scratch import Scratch

from . import direct, linear

# Bytes of one complex array of a chunk on a grid, and on a sequence, which has one transform less in flight: the
# fastest on 32 MB of shared cache. Half or twice as much costs up to a fifth more, ten times as much four times.
_GRID_BYTES, _SEQUENCE_BYTES = 3 << 20, 6 << 20
# Causal: dense below this length; above it each level adds the left half of a segment to its right half.
CAUSAL_BLOCK = 512
# Rounding of one product, per log2 of its length, in units in the last place of ‖c‖₂·‖u‖₂. Searched for the worst:
# 0.47 from 64 tokens up, 0.87 below (tests/ops/test_fft_range.py holds it).
_ROUNDING = 1.0
_TOLERANCE = {torch.float32: 4e-4, torch.float64: 4e-9}


def forward(phi_q, phi_k, v, bias, grid, causal):
    """Numerators and denominators as in `direct.forward`, which also takes any bias out of range."""
    dtype = working_dtype(bias, causal, v.dtype)
    if dtype is None:
        return direct.forward(phi_q, phi_k, v, bias, grid, causal)
    args, bias = [x.to(dtype) for x in (phi_q, phi_k, linear.with_ones(v))], bias.to(dtype)
    c = _normalized(bias, causal)
    if causal:
        out = _blocks_forward(phi_q.to(dtype), phi_k.to(dtype), v.to(dtype), bias)
    else:
        c, mean = _split(c)
        out = linear.product(*args, False).mul_(mean)
    *inputs, acc = (_tokens_last(x, causal) for x in (*args, out))
    for form in _forms(c, grid, causal):
        _accumulate(form, *inputs, acc)
    return linear.split(_tokens_first(acc, out.shape).to(v.dtype))


def backward(phi_q, phi_k, v, bias, grid, causal, grad, bias_grad):
    """Gradients as in `direct.backward`; four transforms per channel instead of two."""
    dtype = working_dtype(bias, causal, v.dtype)
    if dtype is None:
        return direct.backward(phi_q, phi_k, v, bias, grid, causal, grad, bias_grad)
    args, bias = [x.to(dtype) for x in (phi_q, phi_k, linear.with_ones(v), grad)], bias.to(dtype)
    c = smooth = _normalized(bias, causal)
    if causal:
        *grads, d_bias = _blocks_backward(*args, bias, bias_grad)
    else:
        smooth, mean = _split(c)
        grads = linear.product_backward(*args[:3], args[3] * mean, False)
        d_bias = torch.zeros_like(c) if bias_grad else None
    inputs, outputs = ([_tokens_last(x, causal) for x in xs] for xs in (args, grads))
    d_c = torch.zeros_like(c) if bias_grad else None
    for form in _forms(smooth, grid, causal):
        _accumulate_gradients(form, inputs, outputs, d_c)
    if bias_grad:
        d_bias = (d_bias + c * d_c).to(v.dtype)
    d_q, d_k, d_v = (_tokens_first(x, y.shape).to(v.dtype) for x, y in zip(outputs, grads))
    return d_q, d_k, d_v[..., :-1], d_bias


def working_dtype(bias: torch.Tensor, causal: bool, dtype: torch.dtype) -> torch.dtype | None:
    """The narrowest dtype whose FFT holds the tolerance for this bias, or None if none does.

    With weights c ≥ c_min and any u, the FFT's error ε·‖c‖₂·‖u‖₂ is at most ε·‖c‖₂/c_min of Σ_j c_ij|u_j|, whatever the
    positive features and the values are. Without causality c's mean goes through plain sums and ‖c - mean‖₂ counts.
    """
    visible = bias[..., : (bias.shape[-1] + 1) // 2] if causal else bias
    if visible.shape[-1] * visible.shape[-2] == 1:
        return dtype
    if causal and direct.is_wide(visible):
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


class _Grid:
    """The non-causal product: every token of the grid is a source and a target."""

    def __init__(self, c, grid):
        self.grid = grid
        self.padded = toeplitz.padded_size(*grid)
        self.spectrum = toeplitz.spectrum(c, self.padded)  # K, Q', P
        self.cells = self.padded[0] * (self.padded[1] // 2 + 1)
        self.chunk_bytes = _GRID_BYTES if self.padded[0] > 1 else _SEQUENCE_BYTES
        self.scratch = Scratch()

    def source(self, x):
        return x.unflatten(-1, self.grid)

    target = source

    def source_transform(self, a, b):
        """Transform of a·b, as toeplitz.forward_transform, in padding that stays zero from chunk to chunk."""
        (height, width), (p, q) = self.grid, self.padded
        shape = torch.broadcast_shapes(a.shape, b.shape)[:-2]
        x = self.scratch.buffer(('x', *shape), (*shape, height, q), a, zero=True)
        torch.mul(a, b, out=x[..., :width])
        f = torch.fft.rfft(x, dim=-1).transpose(-1, -2)  # ..., Q', H
        if p == 1:
            return f
        y = self.scratch.buffer(('y', *shape), (*shape, q // 2 + 1, p), f, zero=True)
        y[..., :height] = f
        return torch.fft.fft(y, dim=-1)  # ..., Q', P

    target_transform = source_transform

    def target_inverse(self, f):
        return toeplitz.inverse_transform(f, self.padded, *self.grid)

    source_inverse = target_inverse

    def correlation(self, target, source):
        return (torch.conj_physical(target) * source).sum((1, 2))  # g, Q', P

    def add_offsets(self, d_c, cross):
        d_c += toeplitz.table_from_spectrum(cross, self.padded, *self.grid)


class _Halves:
    """One level of the causal product: in each segment of 2L tokens the left half is source, the right half target.

    Later tokens never enter an earlier one's sums, so rounding cannot look ahead. Lags run from 1 to 2L-1: a circular
    product of length 2L holds them.
    """

    chunk_bytes = _SEQUENCE_BYTES

    def __init__(self, c, half, n):
        self.half, self.n = half, n
        lags = c[:, 0, : n - 1].flip(-1)[:, : 2 * half - 1]  # K, lags 1, 2, …
        kernel = c.new_zeros(c.shape[0], 1, 2 * half)
        kernel[:, 0, 1 : 1 + lags.shape[1]] = lags
        self.lag_count = lags.shape[1]
        self.spectrum = torch.fft.rfft(kernel, dim=-1)  # K, 1, Q'
        self.segments = (n - 1 - half) // (2 * half) + 1  # those whose right half exists
        self.cells = self.segments * (half + 1)

    def _segments(self, x):
        return x[..., : self.segments * 2 * self.half].unflatten(-1, (self.segments, 2 * self.half))

    def source(self, x):
        return self._segments(x)[..., : self.half]

    def target(self, x):
        return self._segments(x)[..., self.half :]

    def source_transform(self, a, b):
        return torch.fft.rfft(a * b, n=2 * self.half, dim=-1)

    def target_transform(self, a, b):
        return torch.fft.rfft(torch.nn.functional.pad(a * b, (self.half, 0)), dim=-1)

    def target_inverse(self, f):
        return torch.fft.irfft(f, n=2 * self.half, dim=-1)[..., self.half :]

    def source_inverse(self, f):
        return torch.fft.irfft(f, n=2 * self.half, dim=-1)[..., : self.half]

    def correlation(self, target, source):
        return (torch.conj_physical(target) * source).sum((1, 2, 3)).unsqueeze(1)  # g, 1, Q'

    def add_offsets(self, d_c, cross):
        by_lag = torch.fft.irfft(cross[:, 0], n=2 * self.half, dim=-1)  # K, 2L: at -lag modulo 2L
        by_lag = by_lag.flip(-1)[:, : self.lag_count]  # index l-1 is lag l
        d_c[:, 0, self.n - 1 - self.lag_count : self.n - 1] += by_lag.flip(-1)


def _forms(c, grid, causal):
    if not causal:
        yield _Grid(c, grid)
        return
    n, half = grid[1], CAUSAL_BLOCK
    while half < n:
        yield _Halves(c, half, n)
        half *= 2


def _accumulate(form, phi_q, phi_k, v, acc):
    for g, f, e, spectrum in _chunks(form, phi_k, v):
        u = form.source_transform(form.source(phi_k[g, f, None]), form.source(v[g, None, e]))  # g, f, e, Q', P
        y = form.target_inverse(u.mul_(spectrum))
        y = y.mul_(form.target(phi_q[g, f, None]))
        form.target(acc[g, e]).add_(y.sum(1) if y.shape[1] > 1 else y[:, 0])


def _accumulate_gradients(form, inputs, outputs, d_c):
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


def _chunks(form, phi_k, v) -> Iterator[tuple[slice, slice, slice, torch.Tensor]]:
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


def _normalized(bias, causal):
    """c = exp(b - max) (K, 2H-1, 2W-1), zero where the key comes after the query of a causal sequence."""
    if not causal:
        return (bias - bias.amax((1, 2), keepdim=True)).exp()
    n = (bias.shape[2] + 1) // 2
    c = torch.zeros_like(bias)
    c[:, :, :n] = (bias[:, :, :n] - bias[:, :, :n].amax((1, 2), keepdim=True)).exp()
    return c


def _split(c):
    mean = c.mean((1, 2), keepdim=True)  # K, 1, 1
    return c - mean, mean


def _blocks_forward(phi_q, phi_k, v, bias):
    """The causal product inside blocks of consecutive tokens, dense: (B, K, N, D+1)."""
    blocks, local, scale, size = _blocks((phi_q, phi_k, v), bias)
    num, den = direct.forward(*blocks, local, (1, size), True)
    return _unblock(torch.cat([num, den.unsqueeze(-1)], dim=-1) * scale, v.shape)


def _blocks_backward(phi_q, phi_k, v, grad, bias, bias_grad):
    blocks, local, scale, size = _blocks((phi_q, phi_k, v[..., :-1], grad), bias)
    *grads, d_local = direct.backward(*blocks[:3], local, (1, size), True, blocks[3] * scale, bias_grad)
    d_bias = None
    if bias_grad:
        d_bias = torch.zeros_like(bias)
        centre = bias.shape[2] // 2
        d_bias[:, :, centre - size + 1 : centre + size] = d_local
    grads[2] = torch.nn.functional.pad(grads[2], (0, 1))  # nobody asks for the gradient of the ones
    return *(_unblock(x, y.shape) for x, y in zip(grads, (phi_q, phi_k, v))), d_bias


def _blocks(tensors, bias):
    """Blocks as batch items (B·blocks, K, size, ·), the table of their offsets, and its scale in the whole table."""
    n = tensors[0].shape[2]
    size = min(CAUSAL_BLOCK, n)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, -n % size)) for x in tensors]
    blocks = [x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1) for x in padded]
    local = bias[:, :, n - size : n + size - 1]  # K, 1, 2·size-1
    scale = (local[:, :, :size].amax((1, 2), keepdim=True) - bias[:, :, :n].amax((1, 2), keepdim=True)).exp()
    return blocks, local, scale, size


def _unblock(x, shape):
    return x.unflatten(0, (shape[0], -1)).transpose(1, 2).flatten(2, 3)[:, :, : shape[2]]


def _tokens_last(x, causal):
    """(B, K, N, ·) -> (B·K, ·, N); causal sequences are padded with zeros to whole segments."""
    x = x.flatten(0, 1).transpose(1, 2)
    missing = 0
    if causal:
        segment = CAUSAL_BLOCK
        while segment < x.shape[-1]:
            segment *= 2
        missing = segment - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)).contiguous() if missing else x.contiguous()


def _tokens_first(x, shape):
    return x[..., : shape[2]].transpose(1, 2).reshape(shape)
