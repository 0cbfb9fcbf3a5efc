"""Which cases the Triton kernels serve, and how they multiply. Triton itself is not imported.

# M features, D head dim
"""

import importlib.util
import os
from typing import Any

import torch

from .interface import Case, not_between_cells

AVAILABLE = importlib.util.find_spec('triton') is not None
# The interpreter reads this when Triton is imported: setting it later changes nothing.
INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
LARGEST_HEAD_DIM, MOST_FEATURES = 128, 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(case: Case) -> str | None:
    """What keeps the kernels from serving a case, or None."""
    if not AVAILABLE:
        return 'Triton is not installed'
    if case.device != 'cuda' and not (case.device == 'cpu' and INTERPRETED):
        return f'tensors are on {case.device}, and Triton runs on CUDA (on the CPU with TRITON_INTERPRET=1)'
    if case.feature_dtype != torch.float32 or case.v_dtype not in _DTYPES:
        return (
            f'features are {case.feature_dtype} and values {case.v_dtype}: '
            'float32 beside float32, bfloat16 or float16 is served'
        )
    if case.d > LARGEST_HEAD_DIM or case.m > MOST_FEATURES:
        return f'head dim {case.d} and {case.m} features: up to {LARGEST_HEAD_DIM} and {MOST_FEATURES} are served'
    if case.keys is not None:
        return 'there are not as many keys as queries'
    return not_between_cells(case)


def preferred(case: Case) -> bool:
    """Whether `auto` takes the kernels: n² on tensor cores is ahead of the rest to 10⁵ tokens (docs/backends.md)."""
    # causal without a bias costs N² here and N·M·D by prefix sums
    return case.device == 'cuda' and (case.has_bias or not case.causal)


def precision(v_dtype: torch.dtype) -> str:
    """How float32 numbers are multiplied: as PyTorch's matmul setting allows, TF32 beside half-precision values."""
    if INTERPRETED or torch.version.hip:
        return 'ieee'
    if v_dtype != torch.float32 or torch.get_float32_matmul_precision() != 'highest':
        return 'tf32'
    return 'tf32x3'


def feature_precision() -> str:
    """Exponents keep float32's digits under any setting: TF32's error of 5e-4·‖w‖ would be one of every feature."""
    return 'ieee' if INTERPRETED or torch.version.hip else 'tf32x3'


def refuse_second_derivatives(ctx: Any, *grads: Any) -> None:
    """The backward of a backward: the kernels have none, and what could stand in for them stores N² weights."""
    raise NotImplementedError(
        "backend 'fused' has first derivatives only: for others take backend='direct', in a model attn_backend='direct'"
    )
