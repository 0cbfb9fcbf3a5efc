"""How an op takes part in `torch.func` and in forward-mode derivatives.

`torch.library.register_autograd` makes an op known to autograd, but not to the transforms of `torch.func`, which ask
for an autograd.Function with a context of its own (pytorch issues 168393 and 170834). So there are two ways into an
op: itself, which compilers and exporters see, and a Function around it inside a transform.

# B batch, K heads, N tokens, S what `vmap` maps over
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

Tensors = tuple[torch.Tensor | None, ...]


def transformed(*tensors: torch.Tensor | None) -> bool:
    """Whether a transform of `torch.func` is at work, or one of the tensors has a tangent."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    return any(x is not None and unpack_dual(x).tangent is not None for x in tensors)


def transformable(
    op: Any,
    keep: Callable[[Any, tuple[Any, ...], Any], Tensors],
    backward: Callable[..., Tensors],
    tangents: Callable[..., Tensors],
) -> Callable[..., Any]:
    """Registers an op with autograd, and returns the function by which transforms may go through it too.

    Args:
        op: A custom op with a rule for `vmap`, to be called with all of its arguments.
        keep: Of (ctx, inputs, output): notes in ctx what is no tensor, and returns the tensors to save.
        backward: Of (ctx, *gradients of the outputs), as for `register_autograd`; what it calls is transformable too.
        tangents: Of (ctx, *tangents of the inputs): the tangents of the outputs.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*keep(ctx, inputs, output))

    def save_for_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = keep(ctx, inputs, output)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    op.register_autograd(backward, setup_context=save)
    methods = {'forward': op, 'setup_context': save_for_both, 'backward': backward, 'jvp': tangents}
    members = {name: staticmethod(method) for name, method in methods.items()}
    name = f'Transformed_{op._opoverload._opname}'
    function: Any = type(name, (torch.autograd.Function,), {'generate_vmap_rule': True, **members})

    def call(*args: Any) -> Any:
        inside = transformed(*(x for x in args if isinstance(x, torch.Tensor)))
        return function.apply(*args) if inside else op(*args)

    return call


class Fold:
    """What `vmap` maps over, as more heads where there is a bias, whose gradient is one per S, else as more items.

    The same in forward and backward: a denominator has a factor that may depend on all that a call holds.
    """

    def __init__(self, size: int, by_heads: bool) -> None:
        self.size = size
        self.by_heads = by_heads

    def tokens(self, x: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
        """(B, K, ...) with S at `dim`, or nowhere, as (B, S·K, ...) or (S·B, K, ...)."""
        if x is None:
            return None
        x = self._lead(x, dim)
        return x.transpose(0, 1).flatten(1, 2) if self.by_heads else x.flatten(0, 1)

    def table(self, x: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
        """(K, ...) with S at `dim`, or nowhere, as (S·K, ...)."""
        return None if x is None else self._lead(x, dim).flatten(0, 1)

    def unfold(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `tokens`, S first."""
        if self.by_heads:
            return x.unflatten(1, (self.size, x.shape[1] // self.size)).movedim(1, 0)
        return x.unflatten(0, (self.size, x.shape[0] // self.size))

    def unfold_table(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `table`, S first."""
        return x.unflatten(0, (self.size, x.shape[0] // self.size))

    def inputs(self, tensors: Sequence[torch.Tensor | None], dims: Sequence[int | None]) -> list[torch.Tensor | None]:
        """phi_q, phi_k, v, bias, far, and then whatever has (B, K, ...)."""
        folds = [self.tokens] * 3 + [self.table] * 2 + [self.tokens] * (len(tensors) - 5)
        return [fold(x, dim) for fold, x, dim in zip(folds, tensors, dims)]

    def _lead(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        return x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)
