"""From YAML text and `--set key=value` to a checked Config; every complaint names the file's line."""

import dataclasses
import difflib
import logging
import math
import os
import re
import reprlib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from nprf_vit.errors import InputError, first_line

from .model_kwargs import MODEL_ARGUMENTS
from .schema import FIELDS, Config

_logger = logging.getLogger(__name__)
_KINDS = typing.get_type_hints(Config)
_LARGEST_FILE, _DEEPEST = 2**20, 8  # bytes, levels: a run needs a hundredth and two of these
_LONGEST_INTEGER, _LONGEST_TEXT = 100, 4096  # characters; the second is the system's limit for a path
# what PyYAML's constructors raise, besides errors of their own, for a scalar that is not what its tag says
_NO_VALUE = (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError)
_NAMES = {int: 'an integer', float: 'a number', bool: 'true or false', str: 'text', dict: 'a mapping'}


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-5 as a number: YAML 1.1 wants a dot and a signed exponent, or takes it for text.

    It refuses aliases, by which a few lines become gigabytes, and depths at which Python gives up.
    """

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or self.depth == _DEEPEST:
            problem = 'aliases are not read' if isinstance(event, yaml.AliasEvent) else f'more than {_DEEPEST} levels'
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_yaml_int(self, node: Any) -> int:
        """Python reads hexadecimal and base-60 integers of any length, and then cannot print them."""
        text = self.construct_scalar(node)
        if len(text) > _LONGEST_INTEGER:
            raise ValueError(f'an integer of {len(text)} characters')
        return super().construct_yaml_int(node)


_Loader.add_constructor('tag:yaml.org,2002:int', _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != 'tag:yaml.org,2002:float']
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    'tag:yaml.org,2002:float',
    re.compile(r'[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)'),
    list('-+.0123456789'),
)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a flat YAML file and apply `key=value` overrides on top."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f'no configuration file {path}')
    if path.stat().st_size > _LARGEST_FILE:
        raise InputError(f'{path} has {path.stat().st_size} bytes: a configuration has at most {_LARGEST_FILE}')
    try:
        text = path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f'cannot read configuration file {path}: {first_line(error)}') from None
    entries = _read_entries(text, str(path))
    values = {name: _check(name, value, where) for name, (value, where) in entries.items()}
    return _build(values, overrides, str(path))


def make_config(values: dict[str, Any], overrides: Iterable[str] = (), origin: str = 'configuration') -> Config:
    """The same checks for values that come from a program or a checkpoint."""
    return _build({name: _check(name, value, origin) for name, value in values.items()}, overrides, origin)


def dump_config(config: Config) -> str:
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)


def override(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, **{k: _check(k, v, 'command line') for k, v in changes.items()})


def _build(values: dict[str, Any], overrides: Iterable[str], origin: str) -> Config:
    given = dict(values)
    for item in overrides:
        _apply_override(values, item)
    _fit_warmup(values, given)
    if 'model' not in values:
        raise InputError(f'{origin}: the key model is missing, e.g. model: nprf_deit_base')
    try:
        return Config(**values)
    except InputError as error:
        raise InputError(f'{origin}: {error}') from None


def _apply_override(values: dict[str, Any], item: str) -> None:
    name, sign, text = item.partition('=')
    where = f'--set {item if len(item) < 200 else item[:200] + "…"}'
    if not sign:
        raise InputError(f'{where}: expected key=value')
    value = _parse_scalar(text, where)
    name, dot, inner = name.strip().partition('.')
    if dot:
        if name != 'model_kwargs':
            raise InputError(f'{where}: only model_kwargs has parts, as in model_kwargs.depth=4')
        value = {**values.get(name, {}), inner: value}
    values[name] = _check(name, value, where)


def _fit_warmup(values: dict[str, Any], given: dict[str, Any]) -> None:
    """Shorten a warm-up that no override names to its share of the epochs that one does."""
    epochs, warmup = values.get('epochs', 0), given.get('warmup_epochs', 0)
    if not 0 < epochs <= warmup or values['warmup_epochs'] != warmup or epochs == given.get('epochs'):
        return
    share = max(1, round(warmup * epochs / given.get('epochs', FIELDS['epochs'].default)))
    values['warmup_epochs'] = min(share, epochs - 1)
    if values['warmup_epochs'] == 0 and values.get('sched') == 'inverse_sqrt':
        raise InputError(
            'sched inverse_sqrt falls from the end of its warm-up, which takes an epoch at least: --set epochs=2 or '
            'more (epoch_steps says how long an epoch is), or sched=cosine'
        )
    if os.environ.get('RANK', '0') == '0':
        _logger.warning(
            f'epochs={epochs}: warm-up shortened from {warmup} to {values["warmup_epochs"]} epochs '
            '(--set warmup_epochs=N sets it)'
        )


def _parse_scalar(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader subclass
    except (yaml.YAMLError, *_NO_VALUE) as error:
        raise InputError(f'{where}: not a YAML value ({_problem(error)})') from None


def _read_entries(text: str, origin: str) -> dict[str, tuple[Any, str]]:
    """Top-level keys with their values and `file:line`, read node by node to keep the lines and see duplicates."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f'{origin}: expected a flat mapping of key: value lines')
        entries: dict[str, tuple[Any, str]] = {}
        for key_node, value_node in node.value:
            where = f'{origin}:{key_node.start_mark.line + 1}'
            name = str(_construct(loader, key_node, f'{where}: a key'))
            if name in entries:
                raise InputError(f'{where}: the key {name} appears twice, first at {entries[name][1]}')
            entries[name] = (_construct(loader, value_node, f'{where}: {name}'), where)
        return entries
    except yaml.YAMLError as error:
        mark = getattr(error, 'problem_mark', None)
        line = f':{mark.line + 1}' if mark else ''
        raise InputError(f'{origin}{line}: not valid YAML ({_problem(error)})') from None
    finally:
        if loader is not None:
            loader.dispose()


def _construct(loader: _Loader, node: Any, what: str) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except _NO_VALUE as error:  # a date in month 13, an integer of 5000 digits, !!bool x
        raise InputError(f'{what} is not a YAML value ({first_line(error)})') from None


def _problem(error: Exception) -> str:
    return getattr(error, 'problem', None) or first_line(error)


def _check(name: str, value: Any, where: str) -> Any:
    if name not in FIELDS:
        raise InputError(f'{where}: unknown key {name}; {_suggestion(name, where)}')
    value = _coerce(name, value, _KINDS[name], where)
    for item in value if isinstance(value, tuple) else (value,):
        _check_range(name, item, where)
    if name == 'img_size' and isinstance(value, tuple) and len(value) == 2 and value[0] == value[1]:
        return value[0]  # one spelling of a square, by which runs and their continuations are compared
    return value


def _suggestion(name: str, where: str) -> str:
    """What an unknown key was meant to be, as it would be written there."""
    _, sign, value = where.partition('=')
    if name in MODEL_ARGUMENTS:
        written = f'--set model_kwargs.{name}={value}' if sign else f'model_kwargs: {{{name}: ...}}'
        return f'it is an argument of the model: {written}'
    near = difflib.get_close_matches(name, FIELDS, n=3) or difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.0)
    written = f' (--set {near[0]}={value})' if sign else ''
    others = f'; or {", ".join(near[1:])}' if near[1:] else ''
    return f'the nearest valid key is {near[0]}{written}{others}'


def _coerce(name: str, value: Any, kind: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        kind = kinds[-1] if isinstance(value, (list, tuple)) else kinds[0]  # one number or several
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            value = [value]
        return tuple(_coerce(name, v, typing.get_args(kind)[0], where) for v in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise InputError(f'{where}: {name} expects a finite number, got {_shown(value)}') from None
    if type(value) is not kind:
        hint = ' (quote it: YAML reads yes, no, on and off as true or false)' if isinstance(value, bool) else ''
        raise InputError(f'{where}: {name} expects {_NAMES[kind]}, got {_shown(value)}{hint}')
    if kind is dict and not all(isinstance(key, str) for key in value):
        raise InputError(f'{where}: {name} expects names before its colons, got {_shown(value)}')
    if kind is str and (len(value) > _LONGEST_TEXT or '\0' in value):
        rule = f'at most {_LONGEST_TEXT} characters and no zero byte'
        raise InputError(f'{where}: {name} expects {rule}, got {_shown(value)}, {len(value)} characters')
    if kind is float and not math.isfinite(value):
        raise InputError(f'{where}: {name} expects a finite number, got {value}')
    return value


def _check_range(name: str, value: Any, where: str) -> None:
    limits = FIELDS[name].metadata
    if value is None:
        return
    if limits['choices'] and value not in limits['choices']:
        raise InputError(f'{where}: {name} {_shown(value)} is none of {", ".join(map(str, limits["choices"]))}')
    if limits['low'] is not None and value < limits['low']:
        raise InputError(f'{where}: {name} {_shown(value)} is below the smallest allowed value {limits["low"]}')
    if limits['high'] is not None and value > limits['high']:
        raise InputError(f'{where}: {name} {_shown(value)} is above the largest allowed value {limits["high"]}')


def _shown(value: Any) -> str:
    """In a few words, whatever it is: Python refuses to print integers of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 4 * _LONGEST_INTEGER:
        return f'an integer of {value.bit_length()} bits'
    return reprlib.repr(value)
