"""Which cases the Triton kernels serve, and how they multiply. Triton itself is not imported.

# M features, D head dim
"""

import importlib.util
import os

import torch

AVAILABLE = importlib.util.find_spec('triton') is not None
# The interpreter reads this when Triton is imported: setting it later changes nothing.
INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
LARGEST_HEAD_DIM, MOST_FEATURES = 128, 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(device: torch.device, feature_dtype: torch.dtype, v_dtype: torch.dtype, m: int, d: int) -> str | None:
    """What keeps the kernels from serving a case, or None."""
    if not AVAILABLE:
        return 'Triton is not installed'
    if device.type != 'cuda' and not (device.type == 'cpu' and INTERPRETED):
        return f'tensors are on {device.type}, and Triton runs on CUDA (on the CPU with TRITON_INTERPRET=1)'
    if feature_dtype != torch.float32 or v_dtype not in _DTYPES:
        return (
            f'features are {feature_dtype} and values {v_dtype}: float32 beside float32, bfloat16 or float16 is served'
        )
    return why_not_sizes(m, d)


def why_not_sizes(m: int, d: int) -> str | None:
    """What keeps the kernels from serving m features and head dim d, or None."""
    if d > LARGEST_HEAD_DIM or m > MOST_FEATURES:
        return f'head dim {d} and {m} features: up to {LARGEST_HEAD_DIM} and {MOST_FEATURES} are served'
    return None


def is_chosen(backend: str, v: torch.Tensor, m: int, has_bias: bool, causal: bool) -> bool:
    """Whether `backend` means these kernels for values v (..., D) beside float32 features; raises where it cannot."""
    reason = why_not(v.device, torch.float32, v.dtype, m, v.shape[-1])
    if backend == 'fused' and reason:
        raise ValueError(f"backend 'fused' cannot run: {reason}")
    # causal without a bias costs N² here and N·M·D by prefix sums
    return backend == 'fused' or (backend == 'auto' and v.is_cuda and reason is None and (has_bias or not causal))


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
