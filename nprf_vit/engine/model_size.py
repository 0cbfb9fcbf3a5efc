"""A bound on what building a model may take, where its description comes with a file that may be anyone's."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

ALLOWANCE = 1 << 24  # numbers beyond those of the file: tables of a larger grid, buffers that no file holds
_LEAST = 256  # that each tensor counts for, so that there is an end to their number too


class TooLarge(Exception):
    """A model with more numbers than the bound."""


def largest_for(path: str | Path) -> int:
    """How many numbers a model may have whose weights are in this file: one per byte, and the allowance.

    Weights take two bytes or more each, so that a model at another resolution has room as well.
    """
    return os.stat(path).st_size + ALLOWANCE


@contextlib.contextmanager
def bounded(largest: int) -> Iterator[None]:
    """Raise TooLarge as soon as the modules built inside have more parameters and buffers than this."""
    count = 0

    def note(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
        nonlocal count
        count += 0 if value is None else max(value.numel(), _LEAST)
        if count > largest:
            raise TooLarge

    hooks = [register_module_parameter_registration_hook(note), register_module_buffer_registration_hook(note)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def build_within(largest: int, build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` builds, or TooLarge before memory is taken for it: it is tried without memory first."""
    try:
        with torch.device('meta'), bounded(largest):
            build()
    except TooLarge:
        raise
    except Exception:  # noqa: S110 - some models compute while they are built; whatever else is wrong shows below
        pass
    with bounded(largest):
        return build()
