"""What causal attention does with NaN and infinite tokens: those before them do not notice.

A product with a weight of zero hides a finite number, not an infinite one: 0·inf is NaN. So such tokens are taken out
of the sums, and what they do to themselves and to later tokens is added afterwards.

# B batch, K heads, N tokens, M features, D head dim
"""

from typing import NamedTuple

import torch


class FiniteTokens(NamedTuple):
    """Keys and values with harmless numbers in place of what is not finite, and what that does to the outputs."""

    phi_k: torch.Tensor  # B, K, N, M: all features of a key are one if one is not finite; zeros would mean masked
    v: torch.Tensor  # B, K, N, D
    reach: torch.Tensor  # B, K, N, D: added to a causal output; zero before the first token that is not finite


def without_nonfinite(phi_k: torch.Tensor, v: torch.Tensor) -> FiniteTokens | None:
    """Separates what is not finite from the keys and values of a causal sequence; None if everything is finite."""
    bad_keys = ~phi_k.isfinite().all(-1, keepdim=True)  # B, K, N, 1
    good_values = v.isfinite()
    if good_values.all() and not bad_keys.any():
        return None
    # infinite values stay what they are, as in Σ_j a_ij v_j; a key that is not finite leaves no weight defined
    reach = v.masked_fill(good_values, 0).cumsum(2)
    reach.masked_fill_(bad_keys.cummax(2)[0], torch.nan)
    return FiniteTokens(phi_k.masked_fill(bad_keys, 1), v.where(good_values, 0), reach)
