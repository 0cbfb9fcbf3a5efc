"""Launches, or the record of them, and what the functions that launch share.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton

_recorder: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar('recorder', default=None)


class Launch(NamedTuple):
    """A kernel with its arguments by name, constants included."""

    kernel: triton.JITFunction
    programs: int
    arguments: dict[str, Any]
    num_warps: int


def launch(kernel: triton.JITFunction, programs: int, *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Start a kernel, or only note it where launches are recorded."""
    recorder = _recorder.get()
    if recorder is None:
        kernel[(programs,)](*args, num_warps=num_warps, **constants)
    else:
        recorder.append(Launch(kernel, programs, dict(zip(kernel.arg_names, args)) | constants, num_warps))


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within it nothing runs: launches go into the list, so that tensors may be on the meta device."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


class Problem(NamedTuple):
    """What a call is about, apart from its tensors."""

    grid: tuple[int, int]
    bias: str  # 'none', 'full' or 'window'
    radius: tuple[int, int]  # of the table
    causal: bool
    positive: bool
    precision: str  # of products of float32: 'tf32', 'tf32x3' or 'ieee'
    parts: int  # of the tokens, summed apart in the linear term


def block(size: int) -> int:
    """The power of two that holds `size`, at least 16, the least a tensor core takes."""
    return max(16, triton.next_power_of_2(size))


def is_long(*tensors: torch.Tensor) -> bool:
    """Whether a token's offset within a head may pass 2³¹ elements."""
    return any(x.shape[2] * x.stride(2) >= 2**31 for x in tensors)


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def has_linear_term(p: Problem) -> bool:
    return p.bias != 'full' and not p.causal
