"""What an example prints is shown twice, in its docstring and in docs/examples.md: the same text."""

import ast
import re
import textwrap

import pytest

from ..engine.running import ROOT

PAGE = (ROOT / 'docs' / 'examples.md').read_text(encoding='utf-8')
EXAMPLES = sorted(path for path in (ROOT / 'examples').glob('*.py') if path.name != '__init__.py')
each = pytest.mark.parametrize('path', EXAMPLES, ids=lambda path: path.stem)


def shown(text: str) -> list[str]:
    """The indented blocks of a docstring."""
    blocks = re.findall(r'(?:^    .*\n?)+', text, re.MULTILINE)
    return [textwrap.dedent(block).strip() for block in blocks]


@each
def test_the_page_shows_what_the_example_shows(path):
    blocks = shown(ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')), clean=False) + '\n')
    assert blocks, f'{path.name} shows no output'
    assert [block for block in blocks if block not in PAGE] == []
    assert f'python examples/{path.name}' in PAGE


def test_the_page_names_the_notebook():
    for path in (ROOT / 'examples').glob('*.ipynb'):
        assert f'(../examples/{path.name})' in PAGE


def test_an_output_is_found():
    assert shown('Says.\n\n    a 1\n    b 2\n\nMore.\n') == ['a 1\nb 2']
