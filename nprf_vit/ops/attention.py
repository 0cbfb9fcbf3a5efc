"""kernel_attention: argument checks, cost model, dispatch, and the opaque op that compile and export see.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W); a sequence is a 1×N grid
"""

import math

import torch

from . import direct, fft, flex, linear, step, toeplitz
from .precision import check_alike, without_autocast

BACKENDS = ('auto', 'direct', 'fft', 'linear', 'step', 'flex')
_ALGORITHMS = {'direct': direct, 'fft': fft, 'linear': linear}

# Cost of one point of one channel of an FFT, per log2 of its size, in multiply-adds of `direct`; both measured on two
# CPU cores by `python -m benchmarks.attention --constants`. Other devices use the same constant until measured there.
FFT_POINT = 13.0
# Below this a float32 denominator has lost digits to underflow and the product is repeated in float64.
_SMALL = 1e-30


def kernel_attention(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    far: torch.Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    causal: bool = False,
    backend: str = 'auto',
    positive: bool = True,
) -> torch.Tensor:
    """Kernelized attention with relative position bias, z_i = Σ_j a_ij v_j, a_ij ∝ exp(b_{j-i}) φq_i·φk_j (Eq. 10).

    All backends give the same numbers up to rounding; docs/math.md has the equations and docs/backends.md the ranges.

    Args:
        phi_q: (B, K, N, M) features of the queries.
        phi_k: (B, K, N, M) features of the keys.
        v: (B, K, N, D) values, in the features' dtype, or in half precision beside float32 features.
        bias: (K, 2H-1, 2W-1) with bias[h, dy+H-1, dx+W-1], (dy, dx) = key minus query; (K, 2N-1) without a grid.
        far: (K,) bias of all offsets outside the table, which may then be any odd-sized window, zero offset central.
        grid_size: (H, W), or None for a sequence.
        causal: Whether tokens see only themselves and earlier ones; sequences only.
        backend: One of BACKENDS; 'auto' takes the cheapest by `choose_backend`.
        positive: Whether all features are positive, which is so for every kind but 'trf'.

    Returns:
        (B, K, N, D) in v's dtype. Sums run in float32, or float64 for float64 features, whatever autocast says.
    """
    _check_tensors(phi_q, phi_k, v)
    _check_backend(backend, phi_q, v, bias, grid_size, causal, positive)
    height, width = _check_grid(grid_size, v.shape[2], causal)
    if backend == 'step':
        _check_no_grad(phi_q, phi_k, v, bias, far)
    table = _offset_table(phi_q, bias, far, grid_size, height, width)
    if backend == 'step':
        return step.decode(phi_q, phi_k, v, None if table is None else table[:, 0], positive)
    dtype = torch.promote_types(phi_q.dtype, torch.float32)
    with without_autocast(v):
        args = phi_q.to(dtype), phi_k.to(dtype), v.to(dtype), table
        if backend == 'flex':
            return flex.flex_attention(*args, (height, width), causal).to(v.dtype)
        return _attend(*args, height, width, causal, positive, backend)[0].to(v.dtype)


def choose_backend(grid: tuple[int, int], m: int, d: int, causal: bool, has_bias: bool) -> str:
    """The cheapest backend by a count of operations: a function of shapes only, the same on every run.

    direct: N²(M+D+1) multiply-adds, half of them when causal. fft: M(D+1) channels of a P×Q transform pair, or for
    causal sequences one such pair of half the length per level plus the dense blocks.
    """
    if not has_bias:
        return 'linear'
    n = grid[0] * grid[1]
    dense = n * n * (m + d + 1) * (0.5 if causal else 1.0)
    channels = m * (d + 1)
    if causal:
        levels = max(0, math.ceil(math.log2(max(1, n / fft.CAUSAL_BLOCK))))
        points = sum(n * math.log2(2 * fft.CAUSAL_BLOCK << i) for i in range(levels))
        transforms = FFT_POINT * channels * points + n * fft.CAUSAL_BLOCK * (m + d + 1) * 0.5
    else:
        padded = toeplitz.padded_size(*grid)
        points = padded[0] * padded[1]
        transforms = FFT_POINT * channels * points * math.log2(max(2, points))
    return 'direct' if dense <= transforms else 'fft'


@torch.library.custom_op('nprf_vit::attend', mutates_args=())
def _attend(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its denominators (B, K, N). Opaque, because backends look at the bias's values."""
    algorithm = _algorithm(backend, phi_q, v, bias, (height, width), causal)
    with without_autocast(v):
        num, den = algorithm.forward(phi_q, phi_k, v, bias, (height, width), causal)
        if not positive:
            return num / den.unsqueeze(-1), den.contiguous()
        if den.dtype == torch.float32 and den.amin() < _SMALL:
            z, wide_den = _attend(*_double(phi_q, phi_k, v, bias), height, width, causal, positive, backend)
            return z.float(), wide_den.float()
        den = den.clamp(min=torch.finfo(den.dtype).tiny).contiguous()
        return num.div_(den.unsqueeze(-1)).contiguous(), den


@_attend.register_fake
def _(phi_q, phi_k, v, bias, height, width, causal, positive, backend):
    return torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(v.shape[:-1])


@torch.library.custom_op('nprf_vit::attend_backward', mutates_args=())
def _attend_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor,
    den: torch.Tensor,
    grad: torch.Tensor,
    height: int,
    width: int,
    causal: bool,
    positive: bool,
    backend: str,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of phi_q, phi_k, v and bias (empty if not asked for)."""
    algorithm = _algorithm(backend, phi_q, v, bias, (height, width), causal)
    options = height, width, causal, positive, backend
    with without_autocast(v):
        if positive and den.dtype == torch.float32 and den.amin() < _SMALL:
            inputs = _double(phi_q, phi_k, v, bias)
            z, den = _attend(*inputs, *options)
            return tuple(x.float() for x in _attend_backward(*inputs, z, den, grad.double(), *options, bias_grad))
        # z = num/den: the gradient of num is g/den, that of den is -(g·z)/den
        scaled = grad / den.unsqueeze(-1)
        grad = torch.cat([scaled, -(scaled * z).sum(-1, keepdim=True)], dim=-1)  # B, K, N, D+1
        *grads, d_bias = algorithm.backward(phi_q, phi_k, v, bias, (height, width), causal, grad, bias_grad)
    d_bias = v.new_empty(0) if d_bias is None else d_bias
    return *(x.contiguous() for x in grads), d_bias.contiguous()


@_attend_backward.register_fake
def _(phi_q, phi_k, v, bias, z, den, grad, height, width, causal, positive, backend, bias_grad):
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (phi_q, phi_k, v))
    d_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if bias_grad else v.new_empty(0)
    return *grads, d_bias


def _save(ctx, inputs, output):
    *tensors, ctx.height, ctx.width, ctx.causal, ctx.positive, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad, _):
    options = ctx.height, ctx.width, ctx.causal, ctx.positive, ctx.backend
    bias_grad = ctx.needs_input_grad[3]
    if grad is None:
        return (None,) * 9
    *grads, d_bias = _attend_backward(*ctx.saved_tensors, grad, *options, bias_grad)
    return *grads, d_bias if bias_grad else None, None, None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)


def _algorithm(backend, phi_q, v, bias, grid, causal):
    if backend == 'auto':
        backend = choose_backend(grid, phi_q.shape[-1], v.shape[-1], causal, bias is not None)
    return _ALGORITHMS[backend]


def _double(*tensors):
    return tuple(None if x is None else x.double() for x in tensors)


def _offset_table(phi_q, bias, far, grid_size, height, width):
    """Checks bias and far, and returns the table of all offsets that occur, (K, 2H-1, 2W-1), or None."""
    if bias is None:
        if far is not None:
            raise ValueError('far is the bias beyond a table: it needs bias, got bias=None')
        return None
    heads = phi_q.shape[1]
    expected = (heads, 2 * height - 1, 2 * width - 1) if grid_size else (heads, 2 * width - 1)
    dtype = torch.promote_types(phi_q.dtype, torch.float32)
    for name, x in (('bias', bias), ('far', far)):
        if x is not None and x.device != phi_q.device:
            raise ValueError(f'{name} is on {x.device}, phi_q on {phi_q.device}: expected one device')
        if x is not None and (not x.is_floating_point() or torch.promote_types(x.dtype, torch.float32) != dtype):
            raise ValueError(f'{name} is {x.dtype}, phi_q {phi_q.dtype}: expected {dtype}')
    if far is None:
        if tuple(bias.shape) != expected:
            where = f'a {height}x{width} grid' if grid_size else f'{width} tokens'
            raise ValueError(f'bias {tuple(bias.shape)} does not fit {where}: expected {expected}')
        return bias.to(dtype).reshape(heads, 2 * height - 1, 2 * width - 1)
    if bias.dim() != len(expected) or bias.shape[0] != heads or any(s % 2 == 0 for s in bias.shape[1:]):
        form = '(heads, 2R+1, 2S+1)' if grid_size else '(heads, 2R+1)'
        raise ValueError(f'bias {tuple(bias.shape)} is no window for {heads} heads: with far it must be {form}')
    if tuple(far.shape) != (heads,):
        raise ValueError(f'far {tuple(far.shape)} must have one value per head: expected ({heads},)')
    return _extend(bias.to(dtype).reshape(heads, -1, bias.shape[-1]), far.to(dtype), height, width)


def _extend(window, far, height, width):
    """Pads a window table with `far`, or crops it, to the offsets of an H×W grid."""
    far = far[:, None, None]
    pads = [(2 * n - 1 - s) // 2 for s, n in zip(window.shape[1:], (height, width))]
    table = torch.nn.functional.pad(window - far, (pads[1], pads[1], pads[0], pads[0]))
    return table + far


def _check_tensors(phi_q, phi_k, v):
    shapes = f'phi_q {tuple(phi_q.shape)}, phi_k {tuple(phi_k.shape)}, v {tuple(v.shape)}'
    if phi_q.dim() != 4 or phi_k.dim() != 4 or v.dim() != 4:
        raise ValueError(f'phi_q, phi_k must be (B, heads, N, M) and v (B, heads, N, D), got {shapes}')
    if phi_q.shape != phi_k.shape or phi_q.shape[:3] != v.shape[:3]:
        raise ValueError(f'batch, heads and tokens must agree, and the features of phi_q and phi_k: got {shapes}')
    if min(phi_q.shape) < 1 or v.shape[3] < 1:
        raise ValueError(f'every dimension must be at least 1, got {shapes}')
    check_alike(phi_q, phi_k, v)


def _check_grid(grid_size, n, causal):
    if grid_size is None:
        return 1, n
    if causal:
        raise ValueError(f'causal attention runs over a sequence: expected grid_size=None, got {grid_size}')
    if not isinstance(grid_size, (tuple, list)) or len(grid_size) != 2 or min(grid_size) < 1:
        raise ValueError(f'grid_size must be (H, W) with positive sizes, got {grid_size}')
    height, width = grid_size
    if height * width != n:
        raise ValueError(f'grid_size {height}x{width} holds {height * width} tokens, phi_q and v have {n}')
    return height, width


def _check_backend(backend, phi_q, v, bias, grid_size, causal, positive):
    if backend not in BACKENDS:
        later = ' (window is not available yet)' if backend == 'window' else ''
        raise ValueError(f'unknown backend {backend!r}{later}: expected one of {", ".join(BACKENDS)}')
    able = ['auto', 'direct']
    if bias is None:
        able.append('linear')
    else:
        able.append('fft')
    if causal:
        able.append('step')
    if v.device.type == 'cuda' and positive:
        able.append('flex')
    if backend not in able:
        case = f'{"causal" if causal else "non-causal"}, {"a" if bias is not None else "no"} bias, '
        case += f'{"positive" if positive else "signed"} features on {v.device.type}'
        raise ValueError(f'backend {backend!r} cannot serve this case ({case}): expected one of {", ".join(able)}')


def _check_no_grad(*tensors):
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("backend 'step' decodes without gradients: use torch.no_grad(), or direct, fft or auto")
