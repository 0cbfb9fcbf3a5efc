"""`KernelAttention` one token at a time: what it computes for the last of t tokens, from a cache of the earlier ones.

B batch, C channels, K heads, D head dim, t tokens so far.
"""

import torch

from nprf_vit.ops import DecodeState
from nprf_vit.ops.features import FEATURE_MAPS

from .attention import KernelAttention, unit_norm
from .key_mask import as_key_mask
from .softmax_attention import softmax_attention


class SoftmaxState:
    """Keys and values so far, for softmax attention; cost per token t·D.

    Args:
        bias: (K, 2N-1) by offset as in `nprf_vit.ops.DecodeState`, or None.
        max_len: Most tokens to hold.
        scale: Factor of the scores.
    """

    def __init__(self, bias: torch.Tensor | None, max_len: int, scale: float) -> None:
        self.past = None if bias is None else bias[:, : bias.shape[1] // 2 + 1].detach()  # K, N: offsets 1-N … 0
        self.max_len, self.scale, self.length = max_len, scale, 0
        self.cache: torch.Tensor | None = None

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Takes the next token's q, k, v, each (B, K, D); returns its output (B, K, D)."""
        if self.length >= self.max_len:
            raise ValueError(f'this state holds {self.max_len} tokens and all of them are taken')
        if self.cache is None:
            self.cache = k.new_zeros(2, *k.shape[:2], self.max_len, k.shape[2])
        self.cache[0, :, :, self.length], self.cache[1, :, :, self.length] = k, v
        self.length += 1
        keys, values = self.cache[:, :, :, : self.length]  # B, K, t, D
        scores = (keys @ q.unsqueeze(-1)).squeeze(-1) * self.scale  # B, K, t
        if self.past is not None:
            scores = scores + self.past[:, self.past.shape[1] - self.length :]
        return (scores.softmax(-1).unsqueeze(-2) @ values).squeeze(-2)  # B, K, D


class AttentionStep:
    """Causal `KernelAttention` for generation: one token in, its output out.

    Args:
        attn: The layer; its dropout is left out.
        bias: (K, 2N-1) table of a bias shared between layers; a layer's own is found by itself.
        max_len: Most tokens to generate.
    """

    def __init__(self, attn: KernelAttention, bias: torch.Tensor | None, max_len: int) -> None:
        self.attn = attn
        self.state: SoftmaxState | DecodeState
        if attn.rel_pos_bias is not None:
            # an offset has one bias whatever the length, unless the table is stretched
            stays = attn.rel_pos_bias.extend in ('extend', 'clip')
            bias = attn.rel_pos_bias.whole_table((max_len,) if stays else None)
        if attn.kernel == 'softmax':
            self.state = SoftmaxState(bias, max_len, 1.0 if attn.normalize else attn.head_dim**-0.5)
        else:
            self.state = DecodeState(bias, max_len=max_len, positive=FEATURE_MAPS[attn.kernel].positive)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, C), the next token, to its output (B, C)."""
        attn = self.attn
        q, k, v = attn.project(x.unsqueeze(1))  # B, K, 1, D
        if attn.kernel != 'softmax':
            q, k = attn.features(q, k, causal=True)  # B, K, 1, M
        elif attn.normalize:
            q, k = unit_norm(q).to(v.dtype), unit_norm(k).to(v.dtype)
        z = self.state.step(q.squeeze(2), k.squeeze(2), v.squeeze(2))  # B, K, D
        return attn.proj(attn.norm(z.flatten(1)))


class CrossAttentionStep:
    """`KernelAttention` to a context for generation: keys and values are made once, then one query in, its output out.

    Args:
        attn: The layer; its dropout is left out.
        context: (B, L, C) or (B, H, W, C).
        key_mask: (B, L) or (B, H, W) of bool, False for tokens of the context that are not attended to.
    """

    @torch.no_grad()
    def __init__(self, attn: KernelAttention, context: torch.Tensor, key_mask: torch.Tensor | None = None) -> None:
        self.attn = attn
        _, self.k, self.v = attn.project(context[:, :1], context)  # B, K, L, D
        self.mask = as_key_mask(key_mask, (self.k.shape[0], self.k.shape[2]), self.k.device)
        self.state: DecodeState | None = None
        if attn.kernel == 'softmax':
            self.k = unit_norm(self.k).to(self.v.dtype) if attn.normalize else self.k
        else:
            phi_k = attn.key_features(self.k, key_mask=self.mask)
            self.state = DecodeState.of_keys(phi_k, self.v, self.mask, FEATURE_MAPS[attn.kernel].positive)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, C), the token that asks, to its output (B, C)."""
        attn = self.attn
        q, _, _ = attn.project(x.unsqueeze(1), x.unsqueeze(1))  # B, K, 1, D
        if self.state is not None:
            z = self.state.query(attn.query_features(q).squeeze(2))  # B, K, D
        else:
            q = unit_norm(q).to(self.v.dtype) if attn.normalize else q
            scale = 1.0 if attn.normalize else None
            z = softmax_attention(q, self.k, self.v, key_mask=self.mask, scale=scale).squeeze(2)
        return attn.proj(attn.norm(z.flatten(1)))
