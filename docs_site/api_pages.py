"""The API reference: a page per room of the public API, for mkdocstrings to fill from the docstrings."""

import ast
from pathlib import Path

from .repository import ROOT

ROOMS = {
    'nprf_vit': 'What most programs need. Importing the package registers its models with timm.',
    'nprf_vit.ops': 'Tensors in, tensors out: the attention by itself.',
    'nprf_vit.layers': 'Modules for backbones of your own.',
    'nprf_vit.models': "The classes behind timm's entry points, and the entry points.",
}
ENTRY_POINTS = ('nprf_vit/models/nprf_deit.py', 'nprf_vit/models/pixel.py')


def api_pages() -> dict[str, str]:
    """Place in the site → Markdown with a directive for every public name."""
    return {f'api/{room.rpartition(".")[2]}.md': _page(room, about) for room, about in ROOMS.items()}


def public_names(room: str) -> list[str]:
    """The functions, classes and constants of `__all__`, which is read, not imported; no modules."""
    folder = ROOT / room.replace('.', '/')
    tree = ast.parse((folder / '__init__.py').read_text(encoding='utf-8'))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__'
    )
    return [name for name in names if not (folder / name).is_dir() and not (folder / f'{name}.py').is_file()]


def entry_points(file: str) -> list[str]:
    """Functions with `@register_model`."""
    tree = ast.parse((ROOT / file).read_text(encoding='utf-8'))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any(ast.unparse(d) == 'register_model' for d in f.decorator_list)]


def _page(room: str, about: str) -> str:
    lines = [f'# {room}', '', about, '']
    for name in public_names(room):
        if not name.startswith('__'):
            lines += [f'::: {room}.{name}', '']
    if room == 'nprf_vit.models':
        lines += ['## Entry points', '', 'As `timm.create_model(name, ...)` takes them.', '']
        for file in ENTRY_POINTS:
            module = '.'.join(Path(file).with_suffix('').parts)
            lines += [_directive(f'{module}.{name}', heading_level=3) for name in entry_points(file)]
    return '\n'.join(lines)


def _directive(name: str, **options: object) -> str:
    chosen = ''.join(f'\n      {key}: {value}' for key, value in options.items())
    return f'::: {name}\n    options:{chosen}\n'
