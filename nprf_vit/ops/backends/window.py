"""Products for a bias that is constant beyond a window: dense inside, one linear term outside. docs/math.md, "Window".

    Σ_j c_{j-i} s_ij v_j = Σ_{j in the window of i} (c_{j-i} - c_far) s_ij v_j + c_far Σ_j s_ij v_j

O(N·(2R+1)(2S+1)(M+D)) time and O(N(M+D)) memory.

# B batch, K heads, N tokens, M features, D head dim, H×W grid, window of offsets up to ±R, ±S
# Queries come in blocks of r rows × s columns; blocks in one strip of s columns share their keys' memory.
# A block sees (2R+r) rows × (2S+s) columns of keys; beyond the grid these are zero features.
"""

import itertools
import math
from collections.abc import Iterator

import torch

from ..bias import BiasGradients
from . import linear
from .interface import Backend, Case, Gradients, Grid, Inputs, Product, Sums, not_between_cells
from .window_plan import BLOCK, SEQUENCE_BLOCK, Plan, Strip, crop

# The linear term brings c_far for keys inside the window and the dense part takes it away again. What is left rounds by
# this many units in the last place of c_far, measured below 26 up to 1024 keys (tests/ops/test_window.py), and by an
# eighth per key of larger windows: there equal features gave 350 units for 2000 keys.
_ROUNDING, _FEW_KEYS = 32.0, 1024
# One maximum serves all rows of a head. A row that sees nothing near it sums weights of e^-20, float32 results in
# float64 sums of e^-300.
_DEPTH, _WIDER_DEPTH = 20.0, 300.0
_TOLERANCE = {torch.float32: 4e-4, torch.float64: 4e-9}


def forward(inputs: Inputs, grid: Grid, causal: bool, dtype: torch.dtype) -> Sums:
    """Numerators and denominators, for a bias window (K, 2R+1, 2S+1) and far (K,)."""
    phi_q, phi_k, v, bias = inputs
    plan = Plan.build(bias, grid, causal, dtype)
    weights = plan.tile(plan.inside - plan.far[:, None, None])  # K, q, k
    num, den = torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(v.shape[:-1])
    # one head at a time from end to end: arrays over all heads are beyond what the allocator keeps for the next one
    for b, h in _heads(v):
        q, k, value = (x[b, h].to(weights.dtype) for x in (phi_q, phi_k, v))  # N, ·
        total = _linear(q, k, value, causal).mul_(plan.far[h])  # N, D+1
        queries, keys, values = plan.pad(q, True), plan.pad(k), plan.pad(value)
        out = queries.new_empty(*queries.shape[:2], total.shape[-1])
        for strip in plan.strips():
            _strip_forward(strip, queries, keys, values, out, weights[h])
        total.add_(plan.unpad(out, True))
        num[b, h], den[b, h] = total[:, :-1], total[:, -1]
    return Sums(num, den)


def _strip_forward(
    strip: 'Strip',
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    w: torch.Tensor,
) -> None:
    q, k, value = strip.queries(queries), strip.keys(keys), strip.keys(values)
    parts = []
    for b in strip.chunks(w.numel()):
        scores = torch.bmm(q[b], k[b].transpose(1, 2)).mul_(w)  # blocks, q, k
        parts.append(torch.cat([torch.bmm(scores, value[b]), scores.sum(-1, keepdim=True)], dim=-1))
    strip.queries(out, torch.cat(parts))


def backward(
    inputs: Inputs,
    grid: Grid,
    causal: bool,
    dtype: torch.dtype,
    grad: torch.Tensor,
    bias_grad: bool,
    bias_total: torch.Tensor | None = None,
) -> Gradients:
    """Gradients, given grad (B, K, N, D+1) of numerators and denominators; `bias_total` as in `Product`."""
    phi_q, phi_k, v, bias = inputs
    plan = Plan.build(bias, grid, causal, dtype)
    weights = plan.tile(plan.inside - plan.far[:, None, None])
    d_weights, total = torch.zeros_like(weights), torch.zeros_like(plan.far)  # total: c_far Σ_ij dA_ij s_ij
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (phi_q, phi_k, v))
    for b, h in _heads(v):
        q, k, value, g = (x[b, h].to(weights.dtype) for x in (phi_q, phi_k, v, grad))  # N, ·
        ones = linear.with_ones(value)  # N, D+1
        scaled = g * plan.far[h]
        if bias_grad:
            total[h] += (scaled * _linear(q, k, value, causal)).sum()
        grads = linear.product_backward(*(x[None, None] for x in (q, k, ones, scaled)), causal)
        padded = [plan.pad(x, own) for x, own in ((q, True), (g, True), (k, False), (ones, False))]
        outputs = [torch.zeros_like(padded[i]) for i in (0, 2, 3)]
        for strip in plan.strips():
            _strip_backward(strip, padded, outputs, weights[h], d_weights[h])
        of_q, of_k, of_ones = (
            far_part[0, 0] + plan.unpad(out, own) for far_part, out, own in zip(grads, outputs, (True, False, False))
        )
        d_q[b, h], d_k[b, h], d_v[b, h] = of_q, of_k, of_ones[:, :-1]
    of_bias = BiasGradients()
    if bias_grad and bias is not None:
        of_bias = BiasGradients(
            *(x.to(v.dtype) for x in plan.offset_gradients(d_weights, total, bias.table, bias_total))
        )
    return Gradients(d_q, d_k, d_v, of_bias)


def _heads(v: torch.Tensor) -> Iterator[tuple[int, int]]:
    return itertools.product(range(v.shape[0]), range(v.shape[1]))


def _linear(q: torch.Tensor, k: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    """Σ_j s_ij [v_j, 1] of one head: (N, D+1)."""
    return linear.product(*(x[None, None] for x in (q, k, linear.with_ones(value))), causal)[0, 0]


def _strip_backward(
    strip: 'Strip', inputs: list[torch.Tensor], outputs: list[torch.Tensor], w: torch.Tensor, d_w: torch.Tensor
) -> None:
    queries, grad, keys, ones = inputs
    q, g, k, value = strip.queries(queries), strip.queries(grad), strip.keys(keys), strip.keys(ones)
    d_q = torch.empty_like(q)
    for b in strip.chunks(w.numel()):
        scores = torch.bmm(q[b], k[b].transpose(1, 2))  # blocks, q, k
        d_scores = torch.bmm(g[b], value[b].transpose(1, 2))
        d_w += (scores * d_scores).sum(0)
        scores.mul_(w)
        d_scores.mul_(w)
        torch.bmm(d_scores, k[b], out=d_q[b])
        strip.add_keys(outputs[1], torch.bmm(d_scores.transpose(1, 2), q[b]), b)
        strip.add_keys(outputs[2], torch.bmm(scores.transpose(1, 2), g[b]), b)
    strip.queries(outputs[0], d_q)


def _working_dtype(inputs: Inputs, grid: Grid, causal: bool) -> torch.dtype | None:
    assert inputs.bias is not None  # `_why_not`
    return working_dtype(inputs.bias.table, inputs.bias.far, grid, causal, inputs.v.dtype, inputs.phi_k)


def working_dtype(
    bias: torch.Tensor,
    far: torch.Tensor,
    grid: Grid,
    causal: bool,
    dtype: torch.dtype,
    phi_k: torch.Tensor | None = None,
) -> torch.dtype | None:
    """The narrowest dtype in which neither c_far drowns the window nor one maximum per head drowns a row.

    None if there is none, or if the window holds all offsets: then the full table must be used. With `phi_k` keys
    without any features are looked for: rows need not see even their own key then.
    """
    inside = crop(bias, grid)
    if all(s == 2 * n - 1 for s, n in zip(inside.shape[1:], grid)):
        return None
    zero = inside[:, inside.shape[1] // 2, inside.shape[2] // 2].double()  # K
    if causal:
        inside = inside[..., : inside.shape[-1] // 2 + 1]
    keys = inside[0].numel()
    rounding = _ROUNDING if keys <= _FEW_KEYS else keys / 8
    inside, far = inside.flatten(1).double(), far.double()
    excess = (far - inside.amin(1)).amax().clamp(min=0).item()
    top = torch.maximum(inside.amax(1), far)  # K
    depth = (top - zero).amax().item()  # every row sees its own key
    deep = max(depth, _spread(inside, far, top)) > _DEPTH
    if deep and phi_k is not None and not phi_k.ne(0).any(-1).all():
        return None
    for working in (torch.float32, torch.float64):
        unit = torch.finfo(working).eps / 2
        reach = _DEPTH if working == dtype else _WIDER_DEPTH
        fits = excess <= math.log(_TOLERANCE[dtype] / (rounding * unit)) and depth <= reach
        if working.itemsize >= dtype.itemsize and fits:
            return working
    return None


def _spread(inside: torch.Tensor, far: torch.Tensor, top: torch.Tensor) -> float:
    """How far below the maximum a finite weight of a head lies; minus infinity is no weight."""
    low = torch.cat([inside, far[:, None]], dim=1)
    return (top - low.masked_fill(low == -torch.inf, torch.inf).amin(1)).amax().item()


def _why_not(case: Case) -> str | None:
    return not_between_cells(case) if case.radius is not None else 'the bias has no far constant'


def keys_seen(case: Case) -> int:
    """How many keys a block of queries is multiplied with."""
    assert case.radius is not None  # `_why_not`
    y, x = (min(r, s - 1) for r, s in zip(case.radius, case.grid))
    r, s = SEQUENCE_BLOCK if y == 0 else BLOCK
    return (2 * x + r) if y == 0 else (2 * y + r) * (2 * x + s)


def _cost(case: Case) -> float | None:
    """Blocks of queries against what they see, and the linear term."""
    return case.n * (keys_seen(case) * (case.m + case.d + 1) + 2 * case.m * (case.d + 1))


def log_scale(inputs: Inputs, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """(K, 1): one maximum per head, see `Plan.build`."""
    assert inputs.bias is not None and inputs.bias.far is not None  # `_why_not`
    return torch.maximum(crop(inputs.bias.table, grid).amax((1, 2)), inputs.bias.far)[:, None]


BACKEND = Backend(
    'window', _why_not, _cost, Product(forward, backward, _working_dtype, log_scale=log_scale, uses_bias_total=True)
)
