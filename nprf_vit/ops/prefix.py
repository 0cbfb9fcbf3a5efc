"""Attention of P tokens before a grid, class and register tokens, together with the grid's. docs/math.md, "Prefix".

Each query's sums come in P+1 parts: one over the keys on the grid, and one per key before it. A part is what it would
give alone, and the logarithm of its denominator; the parts' weights are a softmax of these.

# B batch, K heads, P prefix tokens, N tokens on an H×W grid, M features, D head dim
"""

import torch

from .attention import check_arguments
from .backends.interface import Inputs, Partial
from .bias import PrefixBias
from .partial import partial_attention
from .precision import without_autocast

_NOTHING = -1e30  # the logarithm of no weight at all: finite, so that differences are
# How far below all others a zero key stays, which `_log` takes for one of e^-691: under a bias of 700 it would count.
# Its gradient is then at most e^41, in float64 e^599, times what arrives: sums over queries must stay finite.
_DEPTH = {torch.float32: 650.0, torch.float64: 92.0}


def prefix_attention(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    prefix: PrefixBias,
    bias: torch.Tensor | None = None,
    far: torch.Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    backend: str = 'auto',
    positive: bool = True,
    cells: tuple[int, int] | int | None = None,
) -> torch.Tensor:
    """`kernel_attention` among P tokens without a position and the tokens of a grid that follow them.

    Exact: the grid's own sums by any backend, and P dense columns and rows.

    Args:
        phi_q: (B, K, P+N, M) features of the queries.
        phi_k: (B, K, P+N, M) features of the keys.
        v: (B, K, P+N, D) values.
        prefix: The biases of the first P tokens.
        bias: Of the other N tokens, as in `kernel_attention`.
        far: Likewise.
        grid_size: Likewise.
        backend: Likewise.
        positive: Likewise.
        cells: Likewise.

    Returns:
        (B, K, P+N, D) in v's dtype.
    """
    p = check_prefix(prefix, phi_q, v)
    dtype = torch.promote_types(phi_q.dtype, torch.float32)
    on_grid = phi_q[:, :, p:], phi_k[:, :, p:], v[:, :, p:]
    grid, checked = check_arguments(*on_grid, bias, far, grid_size, False, cells)
    phi_q, phi_k, (of_tokens, of_prefix, among) = phi_q.to(dtype), phi_k.to(dtype), (x.to(dtype) for x in prefix)
    with without_autocast(v):
        queries, keys, values = phi_q[:, :, p:], phi_k[:, :, p:], v[:, :, p:]
        prefix_keys, prefix_values = phi_k[:, :, :p], v[:, :, :p].to(dtype)
        part = partial_attention(Inputs(queries, keys, values, checked), grid, positive, backend)
        z = _merge(part, queries, prefix_keys, prefix_values, of_tokens[:, None])
        part = _without_bias(phi_q[:, :, :p], keys, values.to(dtype), positive)
        part = Partial(part.z, part.log_den + of_prefix, part.sign)
        return torch.cat([_merge(part, phi_q[:, :, :p], prefix_keys, prefix_values, among), z], dim=2).to(v.dtype)


def _merge(
    part: Partial, phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Adds P keys (B, K, P, M) with biases (K, 1 or queries, P) to a part of the attention: (B, K, queries, D)."""
    # on the CPU alone in float64, as others may be far slower in it: small weights beside large ones keep their digits
    working = torch.float64 if v.device.type == 'cpu' else v.dtype
    q_size, k_size = (_largest(x, (-1,)) for x in (phi_q, phi_k))
    scores = ((phi_q / q_size) @ (phi_k / k_size).transpose(-1, -2)).to(working)  # B, K, queries, P
    sizes = q_size.to(working).log() + k_size.to(working).log().transpose(-1, -2)
    log_den = part.log_den.to(working).clamp(min=_NOTHING).unsqueeze(-1)
    # a zero key gives its bias no gradient, not even that of 1e-300
    logs = _log(scores if part.sign is None else scores.abs()) + sizes + torch.where(scores == 0, bias.detach(), bias)
    logs = torch.cat([log_den, logs.clamp(min=_NOTHING)], dim=-1)  # B, K, queries, P+1
    exists = torch.cat([torch.ones_like(log_den, dtype=torch.bool), scores != 0], dim=-1) & (logs > _NOTHING)
    logs = _below(logs, exists, _DEPTH[v.dtype])
    if part.sign is None:
        weights = _weights(logs, exists)
    else:
        sign = torch.cat([part.sign.to(working).unsqueeze(-1), scores.detach().sign()], dim=-1)
        weights = _signed_weights(logs, sign * exists)
    weights = weights.to(v.dtype)
    return weights[..., :1] * part.z.to(v.dtype) + weights[..., 1:] @ v


def check_prefix(prefix: PrefixBias, phi_q: torch.Tensor, v: torch.Tensor) -> int:
    """The number of prefix tokens, if the biases are of one and fit."""
    heads, tokens = v.shape[1:3] if v.dim() == 4 else (0, 0)
    p = prefix.prefix_to_prefix.shape[-1]
    expected = {'token_to_prefix': (heads, p), 'prefix_to_token': (heads, p), 'prefix_to_prefix': (heads, p, p)}
    dtype = torch.promote_types(phi_q.dtype, torch.float32)
    for (name, shape), x in zip(expected.items(), prefix):
        if tuple(x.shape) != shape:
            raise ValueError(f'{name} {tuple(x.shape)}: expected {shape} for {heads} heads and {p} prefix tokens')
        if x.device != v.device or torch.promote_types(x.dtype, torch.float32) != dtype:
            raise ValueError(f'{name} is {x.dtype} on {x.device}: expected {dtype} on {v.device}')
    if phi_q.shape[2:3] != v.shape[2:3]:
        raise ValueError(f'{tuple(phi_q.shape[2:3])} queries and {(tokens,)} keys: the prefix tokens are in both')
    if not 1 <= p < tokens:
        raise ValueError(f'{p} prefix tokens of {tokens} tokens: expected at least one, and at least one on the grid')
    return p


def _weights(logs: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """softmax(logs) over the last dimension; zero where nothing has any weight.

    By differences of pairs, so that gradients are w_p w_q (g_p - g_q): of 1 - w nothing is left where w is nearly 1.
    """
    same = torch.eye(logs.shape[-1], dtype=torch.bool, device=logs.device)
    differences = torch.where(same, 0, logs.unsqueeze(-2) - logs.unsqueeze(-1))  # ..., p, q: l_q - l_p
    weights = exists.any(-1, keepdim=True) * (-differences.logsumexp(-1)).exp()
    return weights - weights.detach().masked_fill(exists, 0)  # a zero key has no weight, but a gradient


def _signed_weights(logs: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """sign·exp(logs) divided by its sum over the last dimension; zero where nothing has any weight."""
    terms = sign * (logs - logs.detach().amax(-1, keepdim=True)).exp()
    total = terms.sum(-1, keepdim=True)
    return terms / total.masked_fill(total == 0, torch.inf)


def _below(logs: torch.Tensor, exists: torch.Tensor, depth: float) -> torch.Tensor:
    """Logarithms in which what has no weight lies at least `depth` below the largest that has, whatever its bias."""
    top = logs.detach().masked_fill(~exists, _NOTHING).amax(-1, keepdim=True)
    return logs - (logs.detach() - top + depth).clamp(min=0).masked_fill(exists, 0)


def _without_bias(phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, positive: bool) -> Partial:
    """Attention of a few queries (B, K, P, M) to the keys on the grid, which are all alike to them."""
    q_size, k_size = _largest(phi_q, (-1,)), _largest(phi_k, (-1, -2))
    scores = (phi_q / q_size / k_size) @ phi_k.transpose(-1, -2)  # B, K, P, N
    den = scores.sum(-1)
    log_den = _log(den if positive else den.abs()) + (q_size.log() + k_size.log()).squeeze(-1)
    log_den = log_den.masked_fill(den == 0, -torch.inf)
    z = scores @ v / torch.where(den == 0, 1, den).unsqueeze(-1)
    return Partial(z, log_den, None if positive else den.detach().sign())


def _log(x: torch.Tensor) -> torch.Tensor:
    """log of numbers that are not negative; of zero a number far below all others, in float64 with a gradient."""
    if x.dtype == torch.float64:
        return (x + 1e-300).log()
    return torch.where(x > 0, x.clamp(min=torch.finfo(x.dtype).tiny).log(), _NOTHING)


def _largest(phi: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The largest feature, a constant to autograd, which products are divided by before they could vanish."""
    size = phi.detach().abs().amax(dims, keepdim=True)
    return torch.where(size > 0, size, 1)
