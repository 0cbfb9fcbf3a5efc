"""Causal attention by decoding a whole sequence token by token: `DecodeState` as a backend, without gradients.

# B batch, K heads, N tokens, M features, D head dim
"""

import torch

from ..bias import whole_table
from ..decode import DecodeState
from .interface import Backend, Case, Inputs, Whole, by_name_only, not_between_cells


def attend(inputs: Inputs, case: Case) -> torch.Tensor:
    """(B, K, N, D), each token from the states of the earlier ones."""
    phi_q, phi_k, v, bias = inputs
    tensors = [phi_q, phi_k, v, *(bias or ())]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("backend 'step' decodes without gradients: use torch.no_grad(), or direct, fft or auto")
    table = None if bias is None else whole_table(bias, case.grid)[:, 0]
    state = DecodeState(table, max_len=case.n, positive=case.positive)
    return torch.stack([state.step(phi_q[:, :, t], phi_k[:, :, t], v[:, :, t]) for t in range(case.n)], dim=2)


def _why_not(case: Case) -> str | None:
    return not_between_cells(case) if case.causal else 'decoding is causal'


BACKEND = Backend('step', _why_not, by_name_only, Whole(attend))
