"""Feature maps φ with φ(q)·φ(k) ≈ exp(q·k), and the random projections they use. docs/math.md, "Features".

# B batch, K heads, N tokens, D head dim, M projections
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .key_mask import check_key_mask, hide_keys, replace_keys
from .precision import without_autocast, without_enabled_autocast

ROLES = ('query', 'key')

# Exponents are floored so that no denominator vanishes: a query has one feature at its maximum and sees the key that
# holds the keys' maximum, or its own, so float32 sums stay above the smallest normal number, e^-87.
_FLOOR = {torch.float32: -84.0, torch.float64: -650.0}
# A raw causal key may not know the others' maximum. Since w·x - ‖x‖²/2 ≤ ‖w‖²/2, a constant puts every key below e^60:
# above it float32 has room for 1e5 tokens of size 1e3, and e^144 lies between that and the floor. Where ‖w‖²/2 is more
# than 60 the constant is 1 and larger features, which only keys along a projection have, are cut.
_CAUSAL_TOP = 60.0
# Shorter vectors are not stretched to length one: zero stays zero, and its gradient stays below 1e6 of what arrives.
SHORTEST = 1e-6
_CAUSAL_TRF = 40.0  # nothing bounds ‖x‖²/2 from w alone: centre its range and cut it where float32 would overflow


def draw_projection(
    heads: int, m: int, d: int, kind: str = 'prf', generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draws the projections w, (K, M, D) in float32 on the CPU, the same on every rank and device.

    Args:
        heads: Number of heads, each with projections of its own.
        m: Projections per head.
        d: Head dim.
        kind: 'prf' and 'trf' draw w ~ N(0, I); 'orf' makes blocks of d rows orthogonal and keeps their lengths
            chi-distributed; 'sphere' draws uniformly on the sphere of radius √d; 'elu' uses no projection and gets
            the Gaussian draw, so that switching kinds keeps the shape.
        generator: A CPU generator; None means a new one with seed 0.
    """
    _check_kind(kind)
    if min(heads, m, d) < 1:
        raise ValueError(f'heads, m and d must be positive, got heads={heads}, m={m}, d={d}')
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    if generator.device.type != 'cpu':
        raise ValueError(
            f'draw_projection needs a CPU generator so that every device gets the same w, got {generator.device}'
        )
    # float64 first: QR and norms then round to the same float32 whichever LAPACK runs
    w = torch.randn(heads, m, d, generator=generator, dtype=torch.float64, device='cpu')
    return FEATURE_MAPS[kind].shape_draw(w, generator).float()


def _gaussian(w: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return w


def _on_sphere(w: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return F.normalize(w, dim=-1) * math.sqrt(w.shape[-1])


def _orthogonal(w: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    heads, m, d = w.shape
    lengths = w.norm(dim=-1, keepdim=True)  # K, M, 1
    blocks = []
    for _ in range(0, m, d):
        g = torch.randn(heads, d, d, generator=generator, dtype=torch.float64, device='cpu')
        q, r = torch.linalg.qr(g)
        # the sign fix makes q uniform over the orthogonal group, and unique
        blocks.append(q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2))
    return torch.cat(blocks, dim=-2)[:, :m] * lengths  # K, M, D


def feature_map(
    x: torch.Tensor,
    w: torch.Tensor | None,
    kind: str = 'prf',
    role: str = 'key',
    causal: bool = False,
    normalize: bool = False,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Maps queries or keys to features, up to a factor that cancels in attention.

    prf, orf, sphere (Eq. 5): exp(w·x - ‖x‖²/2)/√M, M features, positive.
    trf (Eq. 4): exp(‖x‖²/2)/√M · [sin(w·x), cos(w·x)], 2M features of either sign.
    elu: elu(x) + 1, D features, positive.

    The factor: a query is divided by its own largest feature, which cancels row by row; keys are divided by the
    largest feature of all keys of that head and batch item, which cancels in both sums. With `normalize` neither is
    needed, because |w·x| ≤ ‖w‖. Raw causal keys are divided by a constant of w instead, because a maximum over later
    tokens would leak; they hold float32's precision up to a norm of 12 (docs/math.md, "Stabilisers"), and causal 'trf'
    keys with ‖x‖²/2 > 80, which no constant of w bounds, are cut there.

    Args:
        x: (..., K, N, D) queries or keys; standard variants scale them by D^-¼ before.
        w: (K, M, D) projections; unused by 'elu'.
        kind: A name of FEATURE_MAPS.
        role: 'query' or 'key'.
        causal: Whether the attention that follows is causal; only changes keys.
        normalize: Whether to L2-normalize x first. The same as passing F.normalize(x, dim=-1, eps=1e-6), up to the
            factor, but the M projections are divided instead of the D coordinates. A token whose norm overflows
            (1.8e19 in float32) counts as one that is at right angles to every projection.
        key_mask: (B, N) of bool beside keys (B, K, N, D): False ones get features of zero and do not count in the
            largest feature of all keys.

    Returns:
        (..., K, N, features) in float32, or in float64 for float64 input.
    """
    return _feature_map(without_autocast, x, w, kind, role, causal, normalize, key_mask)


def plain_feature_map(
    x: torch.Tensor,
    w: torch.Tensor | None,
    kind: str = 'prf',
    role: str = 'key',
    causal: bool = False,
    normalize: bool = False,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`feature_map` for a graph that is to stand alone: it holds no context of autocast unless that is enabled."""
    return _feature_map(without_enabled_autocast, x, w, kind, role, causal, normalize, key_mask)


def _feature_map(
    precision: Callable[[torch.Tensor], AbstractContextManager],
    x: torch.Tensor,
    w: torch.Tensor | None,
    kind: str,
    role: str,
    causal: bool,
    normalize: bool,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    _check_kind(kind)
    if role not in ROLES:
        raise ValueError(f"role must be 'query' or 'key', got {role!r}")
    if not x.is_floating_point():
        raise ValueError(f'x must be floating point, got {x.dtype}')
    if key_mask is not None:
        if role != 'key' or x.dim() != 4:
            raise ValueError(f'key_mask is for keys (B, heads, N, D): got role {role!r} and x {tuple(x.shape)}')
        check_key_mask(key_mask, (x.shape[0], x.shape[2]), x.device)
        features = _feature_map(precision, replace_keys(x, key_mask), w, kind, role, causal, normalize)
        return hide_keys(features, key_mask)
    with precision(x):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if not FEATURE_MAPS[kind].projects:
            x = F.normalize(x, dim=-1, eps=SHORTEST) if normalize else x
            return FEATURE_MAPS[kind].apply(Projected(x), role, causal, normalize)
        w = _check_shapes(x, w).to(x.dtype)
        projected = x @ w.transpose(-1, -2)  # ..., K, N, M
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # ..., K, N, 1
        if normalize:
            projected = projected.mul_(1 / norm.clamp(min=SHORTEST))
            # not norm times its inverse: a norm that overflows leaves a vector that no projection sees, not a NaN
            norm = (norm / SHORTEST).clamp(max=1)
        return FEATURE_MAPS[kind].apply(Projected(projected, norm.square() * 0.5, w), role, causal, normalize)


class Projected(NamedTuple):
    """What a feature map starts from; maps without projections get x itself as `values`, and no more."""

    values: torch.Tensor  # ..., K, N, M: w·x, of normalized x if asked for; may be overwritten
    half_square: torch.Tensor | None = None  # ..., K, N, 1: ‖x‖²/2
    w: torch.Tensor | None = None  # K, M, D


@dataclass(frozen=True)
class FeatureMap:
    """One kind of features; docs/extending.md shows how to add one."""

    apply: Callable[[Projected, str, bool, bool], torch.Tensor]  # of role, causal and normalize: ..., K, N, features
    positive: bool = True  # whether no feature is ever negative
    projects: bool = True  # whether it has random projections
    exponential: bool = False  # whether it is exp(w·x - ‖x‖²/2), which the fused kernels compute
    shape_draw: Callable[[torch.Tensor, torch.Generator], torch.Tensor] = _gaussian  # of w ~ N(0, I) (K, M, D)


def _positive(x: Projected, role: str, causal: bool, normalize: bool) -> torch.Tensor:
    """exp(w·x - ‖x‖²/2)/√M up to the factor; the projections are overwritten, fresh memory costs as much as exp."""
    projected, half_square, w = x
    assert w is not None and half_square is not None
    scale = 0.5 * math.log(w.shape[-2])  # the 1/√M of φ, inside exp
    if normalize:  # nothing to stabilise: |w·x| ≤ ‖w‖, 19 or so for a head dim of 256
        exponent = projected.sub_(scale if role == 'query' else half_square + scale)
        return exponent.clamp_(min=_FLOOR[w.dtype], max=-_FLOOR[w.dtype]).exp_()
    if role == 'query':
        # ‖q‖²/2 is the same for all features of a row, so it goes with the maximum
        exponent = projected.sub_(projected.detach().amax(-1, keepdim=True) + scale)
        return exponent.clamp(min=_FLOOR[w.dtype]).exp_()
    exponent = projected.sub_(half_square)
    if causal:
        top = (w.square().sum(-1).amax(-1)[:, None, None] * 0.5).clamp(max=_CAUSAL_TOP) - _CAUSAL_TOP  # K, 1, 1
        return exponent.sub_(top + scale).clamp(min=_FLOOR[w.dtype], max=_CAUSAL_TOP).exp_()
    top = exponent.detach().amax((-1, -2), keepdim=True)  # ..., K, 1, 1
    return exponent.sub_(top + scale).clamp(min=_FLOOR[w.dtype]).exp_()


def _trigonometric(x: Projected, role: str, causal: bool, normalize: bool) -> torch.Tensor:
    projected, half_square, _ = x
    assert half_square is not None
    waves = torch.cat([projected.sin(), projected.cos()], dim=-1) / math.sqrt(projected.shape[-1])  # ..., K, N, 2M
    if role == 'query':
        return waves
    if normalize:
        return waves * half_square.exp()
    if causal:
        return waves * (half_square - _CAUSAL_TRF).clamp(max=_CAUSAL_TRF).exp()
    return waves * (half_square - half_square.detach().amax(-2, keepdim=True)).exp()


def _elu(x: Projected, role: str, causal: bool, normalize: bool) -> torch.Tensor:
    # F.elu(x) + 1 would round e^x to 1e-7, and a clamp would have no gradient at zero
    return torch.where(x.values > 0, x.values + 1, x.values.masked_fill(x.values > 0, 0).exp())


FEATURE_MAPS: dict[str, FeatureMap] = {
    'prf': FeatureMap(_positive, exponential=True),
    'orf': FeatureMap(_positive, exponential=True, shape_draw=_orthogonal),
    'sphere': FeatureMap(_positive, exponential=True, shape_draw=_on_sphere),
    'trf': FeatureMap(_trigonometric, positive=False),
    'elu': FeatureMap(_elu, projects=False),
}


def _check_kind(kind: str) -> None:
    if kind not in FEATURE_MAPS:
        raise ValueError(f'unknown feature kind {kind!r}: expected one of {", ".join(FEATURE_MAPS)}')


def _check_shapes(x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
    if w is not None and w.device != x.device:
        raise ValueError(f'w is on {w.device}, x on {x.device}: expected one device')
    if w is None or w.dim() != 3 or x.dim() < 3 or x.shape[-3] != w.shape[0] or x.shape[-1] != w.shape[2]:
        got = None if w is None else tuple(w.shape)
        raise ValueError(
            f'projections w {got} do not fit x {tuple(x.shape)}: expected x (..., heads, N, D) and w (heads, M, D)'
        )
    return w
