"""The configuration keys as text for `--help` and as a page of the documentation.

python -m nprf_vit.config.reference > docs/configuration.md
"""

import dataclasses
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from .schema import FIELDS, SECTIONS

_INTRODUCTION = """\
# Configuration

A run is a flat YAML file, such as [configs/digits.yaml](../configs/digits.yaml), of these keys:
`model: nprf_deit_base`. `--set KEY=VALUE ...` overrides them on the command line, values in YAML's
notation: `--set lr=1e-4 img_size=[192,256] model_kwargs.depth=4`. Unknown keys, values of another
type and values out of range are errors that name the line and what would be right. Names are
timm's wherever timm has one.

A run can be continued with other values of the keys marked *may change*; no result depends on
them. `null` is YAML's word for none.

This page is made from the schema in `nprf_vit/config/schema.py` by
`python -m nprf_vit.config.reference > docs/configuration.md`; `python train.py --help`
shows the same.
"""
_KINDS = {str: 'text', int: 'integer', float: 'number', bool: 'true or false', dict: 'mapping'}
_KINDS |= {tuple[int, ...]: 'two integers', tuple[float, ...]: 'numbers', tuple[str, ...]: 'words'}


def sections() -> Iterator[tuple[str, list[dataclasses.Field]]]:
    """Titles with their keys, in the order of the schema."""
    title = ''
    members: list[dataclasses.Field] = []
    for name, item in FIELDS.items():
        if name in SECTIONS and members:
            yield title, members
            members = []
        title = SECTIONS.get(name, title)
        members.append(item)
    yield title, members


def kind(item: dataclasses.Field) -> str:
    """The type of a key in words, with its choices or its range."""
    parts = typing.get_args(item.type) if isinstance(item.type, types.UnionType) else (item.type,)
    names = [_KINDS[part] for part in parts if part is not type(None)]
    words, limits = ' or '.join(names), item.metadata
    if limits['choices']:
        several = 'several of ' if tuple[str, ...] in parts else ''
        return several + ' | '.join(map(str, limits['choices']))
    if limits['low'] is not None:
        words += f', {_number(limits["low"])} to {_number(limits["high"])}'
    return words


def default(item: dataclasses.Field) -> str:
    """The default in YAML's notation; 'required' where there is none."""
    if item.default_factory is not dataclasses.MISSING:
        return '{}'
    return 'required' if item.default is dataclasses.MISSING else _yaml(item.default)


def as_help(width: int = 100) -> str:
    """All keys for `--help`."""
    lines = ['configuration keys (docs/configuration.md), in the YAML file or by --set KEY=VALUE:']
    for title, members in sections():
        lines += ['', f'{title}:']
        for item in members:
            preset = default(item)
            preset = preset if preset == 'required' else f'default {preset}'
            lines.append(f'  {item.name}  ({kind(item)}; {preset})')
            indent = ' ' * 6
            lines += textwrap.wrap(
                _sentence(item).replace('*', ''), width, initial_indent=indent, subsequent_indent=indent
            )
    return '\n'.join(lines)


def as_page() -> str:
    """All keys as Markdown."""
    lines = [_INTRODUCTION]
    for title, members in sections():
        lines += [f'## {title}', '', '| key | type | default | |', '|---|---|---|---|']
        for item in members:
            row = (f'`{item.name}`', kind(item), f'`{default(item)}`', _sentence(item))
            cells = [cell.replace('|', '\\|').replace('`required`', 'required') for cell in row]
            lines.append(f'| {" | ".join(cells)} |')
        lines.append('')
    return '\n'.join(lines)


def _sentence(item: dataclasses.Field) -> str:
    return item.metadata['description'] + (' *May change.*' if item.metadata['free'] else '')


def _number(value: float) -> str:
    return f'{value:,}' if isinstance(value, int) and value < 2**40 else f'{value:.3g}'


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f'[{", ".join(map(_yaml, value))}]'
    if isinstance(value, float):
        return f'{value:.6g}'
    if value is None or isinstance(value, bool):
        return str(value).lower().replace('none', 'null')
    return str(value) or "''"


if __name__ == '__main__':
    print(as_page(), end='')
