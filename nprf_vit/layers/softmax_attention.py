"""Softmax attention, which the kernels approximate: torch's own, with a bias and a mask of keys.

B batch, K heads, N tokens, D head dim.
"""

import torch
import torch.nn.functional as F

from nprf_vit.ops.bias import DenseBias
from nprf_vit.ops.checks import is_empty
from nprf_vit.ops.key_mask import hide_blind_rows, hide_keys, sees_a_key

PLAIN_SCORES = 2**23  # at most so many of them at a time, 50 MB to be kept for the backward pass


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: DenseBias | None = None,
    causal: bool = False,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Σ_j softmax_j(q_i·k_j·scale + b_ij) v_j, (B, K, N, D); a query that sees no key gets zeros, and no gradient.

    Args:
        q, k, v: (B, K, N, D).
        bias: (K, N, N), added to the scores.
        causal: Drop the keys after each query.
        key_mask: (B, N) of bool, False for keys that are not attended to.
        scale: Factor of the scores, D^-1/2 unless given.
        dropout_p: Rate of dropout of the weights.
    """
    if is_empty(q):  # torch's has no gradients then, and DDP waits for some
        scores = q @ k.transpose(-1, -2)
        return (scores if bias is None else scores + bias.matrix.to(q.dtype)) @ v
    plain = plain_is_faster(q, k, v)
    hides = causal or key_mask is not None
    if key_mask is None and bias is None and not plain:
        return F.scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal=causal, scale=scale)
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    if causal:
        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()[None, None]
    if key_mask is not None:
        k, v = hide_keys(k, key_mask), hide_keys(v, key_mask)
        # a softmax over no key is a NaN: such rows see all of them here, and are set to zero afterwards
        blind = ~sees_a_key(key_mask, causal)[:, None, :, None]  # B, 1, N or 1, 1
        visible = (visible & key_mask[:, None, None, :]) | blind  # B, 1, N or 1, N
    if bias is None:
        mask = visible if hides else None
    else:
        mask = bias.matrix.to(q.dtype)
        mask = mask.masked_fill(~visible, float('-inf')) if hides else mask
    attend = plain_attention if plain else F.scaled_dot_product_attention
    z = attend(q, k, v, mask, dropout_p, scale=scale)
    return z if key_mask is None else hide_blind_rows(z, key_mask, causal)


def plain_is_faster(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether to train without torch's fused attention: a small compiled model in bfloat16 on a CPU is 1.7x as fast."""
    trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    wanted = trained and q.device.type == 'cpu' and q.dtype == torch.bfloat16
    return wanted and q[..., 0].numel() * k.shape[-2] <= PLAIN_SCORES


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    """As torch's scaled_dot_product_attention, with scores in float32 as there."""
    with torch.autocast(q.device.type, enabled=False):
        scores = (q.float() * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.float().transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, float('-inf')) if mask.dtype == torch.bool else scores + mask
        return F.dropout(scores.softmax(-1).to(v.dtype), dropout_p) @ v
