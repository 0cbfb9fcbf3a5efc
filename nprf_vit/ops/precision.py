"""Which dtypes may meet, and how autocast is kept out of sums that need float32."""

import contextlib

import torch


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which autocast casts nothing on x's device; meta tensors have no autocast to switch off."""
    return contextlib.nullcontext() if x.device.type == 'meta' else torch.autocast(x.device.type, enabled=False)


def without_enabled_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """As `without_autocast`, and no context at all where nothing is to be switched off: an exported graph holds it."""
    enabled = x.device.type != 'meta' and torch.is_autocast_enabled(x.device.type)
    return without_autocast(x) if enabled else contextlib.nullcontext()


def check_alike(phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor) -> None:
    """One device and one floating dtype; only v may be narrower, as autocast leaves it beside float32 features."""
    if not phi_q.device == phi_k.device == v.device:
        raise ValueError(f'expected one device, got phi_q {phi_q.device}, phi_k {phi_k.device}, v {v.device}')
    for name, x in (('phi_q', phi_q), ('phi_k', phi_k), ('v', v)):
        if not x.is_floating_point():
            raise ValueError(f'{name} must be floating point, got {x.dtype}')
    half_values = v.dtype in (torch.float16, torch.bfloat16) and phi_q.dtype == torch.float32
    if phi_q.dtype != phi_k.dtype or not (v.dtype == phi_q.dtype or half_values):
        raise ValueError(
            f'phi_q {phi_q.dtype}, phi_k {phi_k.dtype}, v {v.dtype}: expected one dtype, '
            'or half-precision v beside float32 features'
        )
