"""What several doors ask of their arguments."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake


def check_tensors(**named: Any) -> None:
    """Raise for what is neither a tensor nor None: a number, a list, an array of another library."""
    for name, x in named.items():
        if x is not None and not isinstance(x, torch.Tensor):
            kind = f'{type(x).__module__}.{type(x).__name__}'.removeprefix('builtins.')
            shown = f' {x}' if isinstance(x, (bool, int, float, str)) else ''
            hint = ', one value per head' if name == 'far' else ''
            raise ValueError(f'{name} is the {kind}{shown}: expected a torch.Tensor{hint}')


def check_tokens(tokens: int, keys: int, height: int, width: int, apart: bool) -> None:
    """Raise where a recorded graph meets images of another size than its grid; `apart`: there need not be as many keys.

    Here and not at the door of `kernel_attention`, which such a graph does not pass.
    """
    if height * width != tokens or (keys != tokens and not apart):
        raise ValueError(
            f'{tokens} queries and {keys} keys for a {height}x{width} grid: expected {height * width} of each '
            '(a traced graph runs at the size that it was traced at)'
        )


def is_whole(x: Any) -> bool:
    """Whether x is a whole number, also one of numpy or a symbol of an exported program."""
    return isinstance(x, torch.SymInt) or hasattr(x, '__index__')


def is_empty(x: torch.Tensor) -> bool:
    """Whether the batch, the first dimension, has no item; a symbol of an exported program has some."""
    return isinstance(x.shape[0], int) and x.shape[0] == 0


def has_values(x: torch.Tensor) -> bool:
    """Whether values can be looked at: meta and fake tensors have shapes only, and so has a program being compiled.

    Inside `vmap` there are several values in the place of one.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return not (x.is_meta or is_fake(x))
