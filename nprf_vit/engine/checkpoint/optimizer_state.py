"""Whether the state that a checkpoint gives an optimizer is one that this optimizer could have."""

import copy
from typing import Any

import torch
from torch import nn

from .file import DAMAGE

State = dict[str, Any]


def for_this_device(state: State, optimizer: torch.optim.Optimizer) -> State:
    """A stored state with the optimizer's own choice of implementation: `fused` follows the device, not the file."""
    groups, own = state['param_groups'], optimizer.param_groups
    if len(groups) != len(own):
        return state  # which the optimizer refuses
    changed = [{**group, 'fused': mine['fused']} if 'fused' in mine else group for group, mine in zip(groups, own)]
    return {**state, 'param_groups': changed}


def expected_state(optimizer: torch.optim.Optimizer) -> tuple[list[State], list[list[State] | None]]:
    """Groups, and by group the state of each parameter after a step: as a copy of the optimizer on no memory has it.

    None instead of states for an optimizer that cannot take a step on tensors without memory.
    """
    groups = [{k: v for k, v in group.items() if k != 'params'} for group in optimizer.param_groups]
    real = [p for group in optimizer.param_groups for p in group['params']]
    stand_ins = {id(p): nn.Parameter(torch.empty_like(p, device='meta')) for p in real}
    try:
        twin = copy.deepcopy(optimizer, dict(stand_ins))  # which takes the stand-ins for copies of the parameters
        for group in twin.param_groups:
            group |= {'fused': None} if 'fused' in group else {}  # needs memory
        for p in stand_ins.values():
            p.grad = torch.empty_like(p)
        twin.step()
        states: list[list[State] | None] = [
            [dict(twin.state[p]) for p in group['params']] for group in twin.param_groups
        ]
    except DAMAGE:  # NotImplementedError is a RuntimeError
        return groups, [None] * len(groups)
    return groups, states


def find_misfit(optimizer: torch.optim.Optimizer, expected: tuple[list[State], list[list[State] | None]]) -> str | None:
    """What of a loaded state differs from it in kind or shape; a parameter may have none yet."""
    for number, (group, known, states) in enumerate(zip(optimizer.param_groups, *expected)):
        for name, value in known.items():
            if name not in group or not _alike(group[name], value):
                return f'{name} of group {number}'
        for i, p in enumerate(group['params']):
            given = optimizer.state.get(p, {})
            wanted = states[i] if states is not None and given else {}
            for name, value in wanted.items():
                if name not in given or not _alike(given[name], value):
                    return f'{name} of parameter {i} in group {number}'
    return None


def _alike(there: Any, here: Any) -> bool:
    if isinstance(here, torch.Tensor):
        return isinstance(there, torch.Tensor) and there.shape == here.shape
    if type(here) in (int, float):
        return type(there) in (int, float)
    if isinstance(here, (list, tuple)):
        return isinstance(there, (list, tuple)) and len(there) == len(here) and all(map(_alike, there, here))
    return here is None or type(there) is type(here)
