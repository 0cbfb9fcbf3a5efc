"""No bias: Φq(Φkᵀ[V, 1]). O(N·M·D) time, O(N(M+D)) memory, causal too. docs/math.md, "Linear"."""

import torch

from ..backends import linear
from ..backends.interface import Case
from .interface import Algorithm, Call, Scaled, row_top


def _sums(call: Call) -> Scaled:
    sums = linear.product(call.phi_q, call.phi_k, call.v, call.causal)
    top = sums.new_zeros(())
    if call.others is None:
        return Scaled(sums, top)
    top = row_top(top, call.others)  # K, 1
    return Scaled(sums * torch.exp(-top)[..., None], top)


def _serves(case: Case) -> bool:
    return not case.has_bias


def _cost(case: Case) -> float:
    return (case.n + (case.keys or case.n)) * case.m * (case.d + 1.0)


ALGORITHM = Algorithm('linear', _serves, _cost, _sums)
