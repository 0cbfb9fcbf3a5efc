"""What the parts of a checkpoint are, checked on the stand-ins of `inspection` before a tensor is built."""

from collections.abc import Callable
from typing import Any

from .inspection import TensorPlan

Check = Callable[[Any], bool]
_LARGEST = 2**63


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _text(value: Any) -> bool:
    return type(value) is str


def _plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _tensor(value: Any) -> bool:
    return isinstance(value, TensorPlan)


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list(check: Check) -> Check:
    return lambda value: type(value) is list and all(check(item) for item in value)


def _dict(key: Check, check: Check) -> Check:
    return lambda value: type(value) is dict and all(key(name) and check(item) for name, item in value.items())


def _fields(**checks: Check) -> Check:
    """A dict with these entries and no others."""
    return lambda value: (
        type(value) is dict and value.keys() == checks.keys() and all(checks[name](value[name]) for name in checks)
    )


def _setting(value: Any) -> bool:
    """A value of a configuration, or of an optimizer's group: plain, or a list or dict of such."""
    if type(value) in (list, tuple):
        return all(_setting(item) for item in value)
    if type(value) is dict:
        return all(_text(name) and _setting(item) for name, item in value.items())
    return _plain(value)


_ROW = _dict(_text, _plain)
_WEIGHTS = _dict(_text, _tensor)
_SPANS = ('epoch', 'interval')
_STATE = _dict(_text, lambda value: _tensor(value) or _setting(value))  # of a parameter or a group

_PARTS: dict[str, Check] = {
    'format': _count,
    'config': lambda value: type(value) is dict and _setting(value),
    'step': _count,
    'history': _list(_ROW),
    'best': _optional(_ROW),
    'metrics': _ROW,
    'skipped': _fields(total=_count, epoch=_count, in_a_row=_count),
    'bad_images': _dict(_count, _text),
    'failed_augmentations': _count,
    'unaugmented': _dict(_count, _text),
    'meter': _fields(sums=_fields(**dict.fromkeys(_SPANS, _number)), counts=_fields(**dict.fromkeys(_SPANS, _count))),
    'state_dict': _WEIGHTS,
    'state_dict_ema': _optional(_WEIGHTS),
    'optimizer': _fields(
        state=_dict(_count, _STATE),
        param_groups=_list(lambda group: _STATE(group) and _list(_count)(group.get('params'))),
    ),
    'scaler': _dict(_text, _number),
    'position': _fields(epoch=_count, step=_count, images=_optional(_count), next=_optional(_list(_count))),
    'generators': _list(_count),
    'checksum': _text,
}
RUN: tuple[str, ...] = (
    'config',
    'step',
    'state_dict',
    'history',
    'best',
    'meter',
    'state_dict_ema',
    'optimizer',
    'scaler',
)
RUN += ('skipped', 'bad_images', 'position', 'generators')


def find_fault(content: dict[Any, Any]) -> str | None:
    """What is wrong with the parts of a checkpoint of this package; parts that it does not know are left alone."""
    for name, check in _PARTS.items():
        if name in content and not check(content[name]):
            return f'its part {name} is not what this package writes'
    return None


def find_missing(content: dict[str, Any], parts: tuple[str, ...]) -> str | None:
    missing = [name for name in parts if name not in content]
    return f'it lacks {", ".join(missing)}' if missing else None


def is_state_dict(content: Any) -> bool:
    return _WEIGHTS(content)
