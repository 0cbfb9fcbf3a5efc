"""Causal attention one token at a time. Cost per token t·(M+D) with a bias, M·D without. docs/math.md, "Decoding".

# B batch, K heads, M features, D head dim, t tokens so far
"""

import torch

from .checks import check_tensors, has_values
from .key_mask import check_key_mask, hide_keys
from .precision import check_alike, without_autocast

# Denominators that have lost digits to underflow: in themselves, or because exp(bias) has beside the largest score.
_SMALL, _SMALL_PART = 1e-30, 1e-20


class DecodeState:
    """Keeps what later tokens need of earlier ones: φ(k) and v with a bias, one constant-size sum without.

    Args:
        bias: (K, 2N-1) as in `kernel_attention`, of which offsets ≤ 0 are used, or None.
        far: (K,) the bias of every offset outside the table, which may then be any odd-sized window.
        max_len: Capacity; by default N where the table says it, and growing by doubling otherwise.
        positive: Whether all features are positive, which is so for every kind but 'trf'.
    """

    def __init__(
        self,
        bias: torch.Tensor | None = None,
        far: torch.Tensor | None = None,
        max_len: int | None = None,
        positive: bool = True,
    ) -> None:
        check_tensors(bias=bias, far=far)
        if bias is not None and (bias.dim() != 2 or bias.shape[1] % 2 == 0):
            raise ValueError(f'bias must be (heads, 2N-1) for decoding, got {tuple(bias.shape)}')
        if far is not None and (bias is None or far.shape != bias.shape[:1]):
            got = None if bias is None else tuple(bias.shape)
            raise ValueError(
                f'far {tuple(far.shape)} needs a bias (heads, 2R+1) and one value per head, got bias {got}'
            )
        if max_len is not None and max_len < 1:
            raise ValueError(f'max_len must be at least 1, got {max_len}')
        self.past = None if bias is None else bias[:, : bias.shape[1] // 2 + 1].detach()  # K, N: offsets 1-N … 0
        self.far = None if far is None else far.detach()
        self.limit = max_len
        if self.past is not None and far is None:
            self.limit = min(max_len or self.past.shape[1], self.past.shape[1])
        self.length = 0
        self.positive = positive
        self.batch: int | None = None
        self.keys: torch.Tensor | None = None  # B, K, capacity, M
        self.values: torch.Tensor | None = None  # B, K, capacity, D+1
        self.state: torch.Tensor | None = None  # B, K, M, D+1
        self.v_dtype: torch.dtype | None = None

    @classmethod
    @torch.no_grad()
    def of_keys(
        cls, phi_k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None, positive: bool = True
    ) -> 'DecodeState':
        """A state without a bias that has seen all of φ(k) (B, K, N, M) and v (B, K, N, D), masked by key_mask (B, N).

        Queried token by token it is cross attention; further tokens may follow, as after a prompt.
        """
        check_tensors(phi_k=phi_k, v=v)
        if phi_k.dim() != 4 or v.dim() != 4 or phi_k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f'expected phi_k (B, heads, N, M) and v (B, heads, N, D), got phi_k {tuple(phi_k.shape)}, '
                f'v {tuple(v.shape)}'
            )
        check_alike(phi_k, phi_k, v)
        if key_mask is not None:
            check_key_mask(key_mask, (phi_k.shape[0], phi_k.shape[2]), phi_k.device)
            phi_k, v = hide_keys(phi_k, key_mask), hide_keys(v, key_mask)
        state = cls(positive=positive)
        dtype = _sum_dtype(phi_k)
        with without_autocast(v):
            state.state = phi_k.to(dtype).transpose(-1, -2) @ _with_one(v, dtype)  # B, K, M, D+1
        state.batch, state.length, state.v_dtype = phi_k.shape[0], phi_k.shape[2], v.dtype
        return state

    @torch.no_grad()
    def query(self, phi_q: torch.Tensor) -> torch.Tensor:
        """The output (B, K, D) of a query φ(q) (B, K, M) that brings no key of its own; without a bias only."""
        check_tensors(phi_q=phi_q)
        if self.past is not None:
            raise ValueError('a query without a key has no place in a sequence with a bias: expected bias=None')
        if self.state is None:
            raise ValueError('this state has seen no key: expected DecodeState.of_keys(...), or a step')
        if phi_q.shape != self.state.shape[:3]:
            raise ValueError(f'phi_q {tuple(phi_q.shape)}: expected one token, {tuple(self.state.shape[:3])}')
        with without_autocast(phi_q):
            sums = (phi_q.to(self.state.dtype).unsqueeze(-2) @ self.state).squeeze(-2)  # B, K, D+1
        return self._normalized(sums)

    @torch.no_grad()
    def step(
        self, phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Takes the next token's φ(q), φ(k) (B, K, M) and v (B, K, D); returns its output (B, K, D) in v's dtype.

        With key_mask (B,) of bool, no token attends to this one where it is False: padding before a shorter sequence.
        """
        check_tensors(phi_q=phi_q, phi_k=phi_k, v=v)
        self._check(phi_q, phi_k, v)
        if key_mask is not None:
            check_key_mask(key_mask, (phi_k.shape[0],), phi_k.device)
            hidden = ~key_mask[:, None, None]
            phi_k, v = phi_k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        dtype = torch.promote_types(phi_q.dtype, torch.float32) if self.past is not None else _sum_dtype(phi_q)
        with without_autocast(v):
            args = phi_q.to(dtype), phi_k.to(dtype), _with_one(v, dtype)
            sums = self._without_bias(*args) if self.past is None else self._with_bias(*args)
        self.length, self.batch, self.v_dtype = self.length + 1, phi_q.shape[0], v.dtype
        return self._normalized(sums)

    def _normalized(self, sums: torch.Tensor) -> torch.Tensor:
        """Numerators over denominators, (B, K, D) in the values' dtype."""
        den = sums[..., -1:]
        if self.positive:  # below every denominator of positive features; keeps an all-zero row finite
            den = den.clamp(min=torch.finfo(sums.dtype).tiny)
        else:  # no key seen yet
            den = den.masked_fill(den == 0, torch.inf)
        return (sums[..., :-1] / den).to(self.v_dtype)

    def _without_bias(self, phi_q: torch.Tensor, phi_k: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        update = phi_k.unsqueeze(-1) * values.unsqueeze(-2)  # B, K, M, D+1
        self.state = update if self.state is None else self.state.add_(update)
        return (phi_q.unsqueeze(-2) @ self.state).squeeze(-2)  # B, K, D+1

    def _with_bias(self, phi_q: torch.Tensor, phi_k: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        all_keys, all_values = self._reserve(phi_k, values)
        all_keys[:, :, self.length], all_values[:, :, self.length] = phi_k, values
        t = self.length + 1
        bias = self._recent(t).to(phi_q.dtype)  # K, t
        # a factor per query cancels: the scores of small features then stay above what float32 can hold
        phi_q = phi_q / phi_q.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(phi_q.dtype).tiny)
        scores = (all_keys[:, :, :t] @ phi_q.unsqueeze(-1)).squeeze(-1)  # B, K, t
        values = all_values[:, :, :t]
        # asking whether it is needed would stop the host, or has no answer
        if self.positive and (scores.device.type != 'cpu' or not has_values(scores)):
            return _sum_values(_log_weights(scores, bias), values)
        if not self.positive:
            return _sum_values(scores * _from_largest(bias, scores).exp(), values)
        sums = _sum_values(scores * (bias - bias.amax(-1, keepdim=True)).exp(), values)
        den = sums[..., -1]
        kept = (den >= _SMALL) & (den > _SMALL_PART * scores.amax(-1)) & sums.isfinite().all(-1)  # B, K
        if not kept.all():
            sums = torch.where(kept.unsqueeze(-1), sums, _sum_values(_log_weights(scores, bias), values))
        return sums

    def _recent(self, t: int) -> torch.Tensor:
        """The bias (K, t) of the last t offsets up to zero."""
        assert self.past is not None  # `step`
        known = self.past.shape[1]
        if t <= known:
            return self.past[:, known - t :]
        assert self.far is not None  # else `limit` has refused t
        return torch.cat([self.far[:, None].expand(-1, t - known), self.past], dim=1)

    def _reserve(self, phi_k: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of keys and values with room for one more token."""
        if self.keys is not None and self.values is not None and self.length < self.keys.shape[2]:
            return self.keys, self.values
        size = self.limit or max(256, 2 * self.length)
        keys, all_values = (x.new_zeros(*x.shape[:2], size, x.shape[2]) for x in (phi_k, values))
        if self.keys is not None:
            keys[:, :, : self.length], all_values[:, :, : self.length] = self.keys, self.values
        self.keys, self.values = keys, all_values
        return keys, all_values

    def _check(self, phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor) -> None:
        if phi_q.dim() != 3 or phi_q.shape != phi_k.shape or v.dim() != 3 or v.shape[:2] != phi_q.shape[:2]:
            raise ValueError(
                f'step takes one token: phi_q and phi_k (B, heads, M), v (B, heads, D); got {tuple(phi_q.shape)}, '
                f'{tuple(phi_k.shape)}, {tuple(v.shape)}'
            )
        check_alike(phi_q, phi_k, v)
        if self.past is not None and self.past.shape[0] != phi_q.shape[1]:
            raise ValueError(f'bias has {self.past.shape[0]} heads, phi_q {tuple(phi_q.shape)} has {phi_q.shape[1]}')
        if self.batch not in (None, phi_q.shape[0]):
            raise ValueError(
                f'this state holds a batch of {self.batch}, phi_q {tuple(phi_q.shape)} has {phi_q.shape[0]}'
            )
        if self.limit is not None and self.length >= self.limit:
            raise ValueError(f'this state holds {self.limit} tokens and all of them are taken')


def _sum_dtype(phi: torch.Tensor) -> torch.dtype:
    """Of a sum over tokens: in float32 it drifts by a rounding per token, and products of small features vanish."""
    # Apple's GPUs have no float64
    return torch.promote_types(phi.dtype, torch.float32) if phi.device.type == 'mps' else torch.float64


def _with_one(v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values (..., D) and a one, (..., D+1)."""
    return torch.cat([v.to(dtype), v.new_ones(*v.shape[:-1], 1, dtype=dtype)], dim=-1)


def _sum_values(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (weights.unsqueeze(-2) @ values).squeeze(-2)  # B, K, D+1


def _log_weights(scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """scores·exp(bias) up to a factor per row, by logarithms: any positive score and any bias; zeros stay zero."""
    logs = scores.log() + _from_largest(bias, scores)
    return (logs - logs.amax(-1, keepdim=True).clamp(min=torch.finfo(logs.dtype).min)).exp()


def _from_largest(bias: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The bias (B, K, t) measured from the largest that counts: beside that of a zero key the others would vanish."""
    seen = bias.masked_fill(scores == 0, -torch.inf)  # B, K, t
    return seen - seen.amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)
