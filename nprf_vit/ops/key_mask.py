"""Keys that nobody attends to: padding, or patches that were left out. docs/math.md, "Masks".

Every backend knows them as keys of zero features: these have no weight, and no row maximum looks at them.

# B batch, K heads, N queries, L keys, M features, D head dim
"""

import torch


def check_key_mask(key_mask: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise for what is not one bool per key: (B, L), or (B,) for one key."""
    if not isinstance(key_mask, torch.Tensor):
        raise ValueError(f'key_mask must be a tensor of bool, got {type(key_mask).__name__}')
    if key_mask.dtype != torch.bool:
        raise ValueError(f'key_mask is {key_mask.dtype}: expected torch.bool, False for keys that are not attended to')
    if tuple(key_mask.shape) != shape:
        raise ValueError(f'key_mask {tuple(key_mask.shape)}: expected one bool per key, {shape}')
    if key_mask.device != device:
        raise ValueError(f'key_mask is on {key_mask.device}, the keys on {device}: expected one device')


def hide_keys(x: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
    """Features or values (B, K, L, ·) with zeros in place of masked keys, NaN or not; their gradient is zero."""
    return x.masked_fill(~key_mask[:, None, :, None], 0)


def replace_keys(x: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
    """Keys (B, K, L, D) with the first visible one in place of masked ones: maxima over keys do not see those."""
    first = key_mask.int().argmax(-1)[:, None, None, None].expand(-1, x.shape[1], 1, x.shape[3])  # B, K, 1, D
    return torch.where(key_mask[:, None, :, None], x, x.detach().gather(2, first))


def hide_blind_rows(z: torch.Tensor, key_mask: torch.Tensor, causal: bool) -> torch.Tensor:
    """Outputs (B, K, N, D) with zeros where a query sees no key, and no gradient there."""
    return z.masked_fill(~sees_a_key(key_mask, causal)[:, None, :, None], 0)


def sees_a_key(key_mask: torch.Tensor, causal: bool) -> torch.Tensor:
    """Which queries see any key: (B, N), or (B, 1) where all see the same."""
    return key_mask.int().cumsum(1) > 0 if causal else key_mask.any(1, keepdim=True)
