"""Modules that torch.fx keeps whole, whoever traces.

They branch on shapes, which a tracer does not know. timm's own tracer is told by `register_notrace_module`; the plain
one and torchvision's enter every module that is not torch's.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@torch.fx.wrap
def run_whole(module: nn.Module, owner: str, *args: Any, **kwargs: Any) -> Any:
    """`forward` of a module as the class named `owner` defines it: one node of a graph."""
    forward: Any = next(vars(c)['forward'] for c in type(module).__mro__ if c.__name__ == owner)
    return forward.__wrapped__(module, *args, **kwargs)


def keep_whole(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the `forward` of a module: while torch.fx traces, a call of it is one node."""
    owner = forward.__qualname__.split('.')[0]

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not any(_is_traced(x) for x in (*args, *kwargs.values())):
            return forward(self, *args, **kwargs)
        return run_whole(self, owner, *args, **kwargs)

    return call


def _is_traced(x: Any) -> bool:
    """Whether x, or a size in it, stands for a value of a graph that is being traced."""
    return isinstance(x, torch.fx.Proxy) or (type(x) is tuple and any(_is_traced(size) for size in x))
