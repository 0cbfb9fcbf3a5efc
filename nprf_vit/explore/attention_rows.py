"""Rows of the attention matrices of a model, for chosen queries: what the model itself weighs its values by.

B batch, K heads, Q chosen queries, N tokens, M features, D head dim.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from nprf_vit.errors import InputError
from nprf_vit.layers import KernelAttention
from nprf_vit.layers.attention import unit_norm
from nprf_vit.ops.bias import AnyBias, Bias, DenseBias, PrefixedBias

STEPS = 255  # of the quantized weights


class Quantized(NamedTuple):
    """Rows in 8 bits: the weight of byte b is low + (high - low) · b / 255, wrong by half a step at most."""

    bytes: torch.Tensor  # L, K, Q, N, uint8
    low: torch.Tensor  # L, K, Q: 0, unless a feature map has negative weights
    high: torch.Tensor  # L, K, Q: the largest weight of the row


class Attended(NamedTuple):
    """What a model computed from one image, and where it looked on the way."""

    output: torch.Tensor
    rows: torch.Tensor  # L, K, Q, N, float64: each sums to one


@torch.no_grad()
def attention_rows(model: nn.Module, images: torch.Tensor, queries: torch.Tensor) -> Attended:
    """Run a model on one image and keep the rows of chosen tokens.

    Args:
        model: Of this package, or a ViT of timm; in evaluation mode.
        images: (1, C, H, W).
        queries: (Q,) token numbers, counted with class and register tokens.
    """
    layers: list[torch.Tensor] = []
    with _hooked(model, queries, layers):
        output = model(images)
    if not layers:
        raise InputError(f'{type(model).__name__} has no attention that can be shown: expected a ViT')
    if len({rows.shape for rows in layers}) > 1:
        shapes = ', '.join(sorted({'x'.join(map(str, rows.shape)) for rows in layers}))
        raise InputError(f'the layers of {type(model).__name__} differ in heads or tokens ({shapes}): expected a ViT')
    return Attended(output, torch.stack(layers))


@contextlib.contextmanager
def _hooked(model: nn.Module, queries: torch.Tensor, layers: list[torch.Tensor]) -> Iterator[None]:
    """While entered, every attention layer appends its rows (K, Q, N)."""

    def kernelized(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(layer, KernelAttention)
        bias = args[1] if len(args) > 1 else kwargs.get('bias')
        layers.append(kernel_rows(layer, args[0], bias, queries, kwargs.get('grid_size')))

    def dense(dropout: nn.Module, args: tuple[Any, ...]) -> None:
        matrix = args[0]  # B, K, N, N, as timm's attention hands it to its dropout
        if matrix.ndim != 4 or matrix.shape[0] != 1 or int(queries.max()) >= matrix.shape[2]:
            shape = 'x'.join(map(str, matrix.shape))
            raise InputError(f'{type(model).__name__} attends within windows ({shape}): expected a plain ViT')
        layers.append(matrix[0, :, queries].double())

    with contextlib.ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, KernelAttention):
                stack.callback(layer.register_forward_pre_hook(kernelized, with_kwargs=True).remove)
            elif hasattr(layer, 'fused_attn') and isinstance(getattr(layer, 'attn_drop', None), nn.Module):
                stack.callback(setattr, layer, 'fused_attn', layer.fused_attn)
                layer.fused_attn = False  # the path that forms the matrix
                stack.callback(layer.attn_drop.register_forward_pre_hook(dense).remove)
        yield


def kernel_rows(
    layer: KernelAttention,
    x: torch.Tensor,
    bias: AnyBias | torch.Tensor | None,
    queries: torch.Tensor,
    grid_size: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """The rows (K, Q, N) of one layer on its input x (1, H, W, C) or (1, N, C); cost K·Q·N·M."""
    if layer.rel_pos_bias is not None:
        bias = layer.rel_pos_bias(_grid_size(layer, x, grid_size), layer.causal)
    if isinstance(bias, torch.Tensor):
        bias = DenseBias(bias) if layer.kernel == 'softmax' else Bias(bias)
    q, k, _ = layer.project(x)  # 1, K, N, D
    tokens = q.shape[2]
    log_c = bias_rows(bias, tuple(x.shape[1:-1]), queries)  # K or 1, Q, N
    if layer.causal:
        log_c = log_c.masked_fill(torch.arange(tokens) > queries[:, None], float('-inf'))
    if layer.kernel == 'softmax':
        if layer.normalize:
            q, k = unit_norm(q), unit_norm(k)
        scale = 1.0 if layer.normalize else layer.head_dim**-0.5
        scores = q[0, :, queries].double() @ k[0].double().transpose(1, 2) * scale  # K, Q, N
        return (scores + log_c).softmax(-1)
    phi_q, phi_k = layer.features(q, k, layer.causal)
    c = (log_c - log_c.amax(-1, keepdim=True)).exp()
    weights = phi_q[0, :, queries].double() @ phi_k[0].double().transpose(1, 2) * c  # K, Q, N
    return weights / weights.sum(-1, keepdim=True)


def _grid_size(layer: KernelAttention, x: torch.Tensor, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """(H, W), or (N,) of a sequence, which under a 2-D bias of the layer's own is the grid given, or that bias's."""
    own = layer.rel_pos_bias
    assert own is not None
    if x.ndim == 3 and len(own.grid_size) == 2:
        return tuple(given or own.grid_size)
    return tuple(x.shape[1:-1])


def bias_rows(bias: AnyBias | None, grid_size: tuple[int, ...], queries: torch.Tensor) -> torch.Tensor:
    """b_{j-i} of chosen queries i and all keys j, (K, Q, N), or zeros (1, Q, N) where there is none.

    Args:
        grid_size: (H, W) or (N,); with tokens before the grid, that in the bias counts.
    """
    tokens = math.prod(grid_size)
    if bias is None:
        return torch.zeros(1, len(queries), tokens, dtype=torch.float64)
    if isinstance(bias, DenseBias):
        return bias.matrix[:, queries].double()
    if isinstance(bias, PrefixedBias):
        return _prefixed_rows(bias, queries)
    table, far, cells = bias
    index = torch.zeros(len(queries), tokens, dtype=torch.long)
    inside = torch.ones(len(queries), tokens, dtype=torch.bool)
    below = tokens
    for axis, size in enumerate(grid_size):
        below //= size
        position = torch.arange(tokens) // below % size
        if cells is not None:
            position = (2 * position + 1) * cells[axis] // (2 * size)
        entries = table.shape[1 + axis]
        entry = position - position[queries][:, None] + entries // 2  # Q, N
        inside &= (entry >= 0) & (entry < entries)
        index = index * entries + entry.clamp(0, entries - 1)
    rows = table.flatten(1)[:, index].double()  # K, Q, N
    return rows if far is None else torch.where(inside, rows, far.double()[:, None, None])


def _prefixed_rows(bias: PrefixedBias, queries: torch.Tensor) -> torch.Tensor:
    """With P tokens before the grid, (K, Q, P+N): to and from these each has a number in place of offsets."""
    prefix = bias.prefix
    count, tokens = prefix.token_to_prefix.shape[1], math.prod(bias.grid_size)
    before, on_grid = queries < count, queries >= count
    rows = prefix.token_to_prefix.new_zeros(len(prefix.token_to_prefix), len(queries), count + tokens).double()
    rows[:, before, :count] = prefix.prefix_to_prefix[:, queries[before]].double()
    rows[:, before, count:] = prefix.prefix_to_token[:, queries[before], None].double()
    rows[:, on_grid, :count] = prefix.token_to_prefix[:, None].double()
    rows[:, on_grid, count:] = bias_rows(bias.grid, bias.grid_size, queries[on_grid] - count)
    return rows


def quantize(rows: torch.Tensor) -> Quantized:
    """Rows (L, K, Q, N) in 8 bits, each on a scale of its own."""
    low, high = rows.amin(-1).clamp(max=0), rows.amax(-1)
    spread = (high - low).clamp_min(torch.finfo(torch.float64).tiny)[..., None]
    steps = ((rows - low[..., None]) / spread * STEPS).round()
    return Quantized(steps.to(torch.uint8), low.float(), high.float())


def dequantize(packed: Quantized) -> torch.Tensor:
    """What the page shows."""
    low, high = packed.low.double()[..., None], packed.high.double()[..., None]
    return low + (high - low) * packed.bytes.double() / STEPS
