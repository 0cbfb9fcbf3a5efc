"""Imports point downward: which room may use which, and no circles. Also those inside functions count."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / 'nprf_vit'
FOUNDATION = {'errors', 'exit_codes', 'processes', 'terminal', 'version'}
# a room (a folder or a file of nprf_vit/) and the rooms it may import, besides itself
BELOW = {name: set() for name in FOUNDATION}
BELOW |= {
    'errors': {'exit_codes', 'terminal'},
    'command': FOUNDATION,
    'config': FOUNDATION,
    'html_page': FOUNDATION,
    'ops': set(),
    'layers': {'ops'},
    'diagnosis': FOUNDATION | {'ops'},
    'models': {'ops', 'layers'},
    'data': FOUNDATION | {'config'},
    'engine': FOUNDATION | {'config', 'html_page', 'ops', 'layers', 'models', 'data'},
    '__init__': {'ops', 'layers', 'models', 'version'},
}
# commands: nothing imports them, and they use what they need
TOOLS = {'convert_checkpoint', 'doctor', 'explore', 'hub', 'list', 'report', 'sample', 'train', 'validate'}
BELOW |= {name: set(BELOW) - TOOLS - {'__init__'} for name in TOOLS}
BELOW['explore'] |= {'sample'}  # the completions of a model of pixels are those that it draws


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def imported(tree: ast.AST, module: str, is_package: bool, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports: `from room import file` is the file, else the room."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = module.split('.')[: len(module.split('.')) - node.level + is_package] if node.level else []
            origin = '.'.join([*up, *([node.module] if node.module else [])])
            names = {f'{origin}.{alias.name}' for alias in node.names}
            found |= (names & modules) | ({origin} if names - modules else set())
    return found & modules - {module}


def import_graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    files = {module_name(file, package): file for file in package.rglob('*.py')}
    return {
        module: imported(ast.parse(file.read_text('utf-8')), module, file.name == '__init__.py', set(files))
        for module, file in files.items()
    }


def room(module: str) -> str:
    return module.split('.')[1] if '.' in module else '__init__'


def upward(graph: dict[str, set[str]]) -> list[str]:
    return sorted(
        f'{module} imports {other}'
        for module, others in graph.items()
        for other in others
        if room(other) != room(module) and room(other) not in BELOW[room(module)]
    )


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_every_room_has_its_place():
    assert {room(module) for module in import_graph()} == set(BELOW)


def test_imports_point_downward():
    assert upward(import_graph()) == []


def test_no_circles():
    assert circle(import_graph()) == []


@pytest.mark.parametrize(
    'line',
    [
        'from nprf_vit.layers.rel_pos import RelPosBias',
        'from nprf_vit import layers',
        'from ..layers import RelPosBias',
        'from .. import layers',
        'import nprf_vit.layers.rel_pos as r',
        'def late():\n    from ..layers.rel_pos import RelPosBias',
    ],
)
def test_an_import_upward_is_noticed(tmp_path, line):
    package = tmp_path / 'nprf_vit'
    for name, text in {'layers/rel_pos.py': 'class RelPosBias: ...', 'ops/fft.py': line, 'models/a.py': line}.items():
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text(text)
        (package / name).with_name('__init__.py').write_text('')
    (found,) = upward(import_graph(package))
    assert found.startswith('nprf_vit.ops.fft imports nprf_vit.layers')


def test_a_circle_is_noticed():
    assert circle({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) in (['b', 'c', 'b'], ['c', 'b', 'c'])
