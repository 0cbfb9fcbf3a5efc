"""Every block of Python in every document runs as printed."""

import ast
import importlib.util
import re
import warnings
from pathlib import Path

import pytest

from .markdown import ROOT, anchor, find_pages, python_blocks, read_blocks
from .run_page import run_page, script

# page#section of a block, and why it cannot run in a test
NOT_RUN: dict[str, str] = {}
# blocks that take a minute by themselves, and why; in the slow test only. Later blocks of the page must not need them.
SLOW: dict[str, str] = {
    'docs/export.md#aotinductor': 'compiles C++',
    'docs/export.md#onnx': 'exports and optimizes a graph',
    'docs/export.md#openvino': 'converts and compiles a graph',
}
PAGES = {page.relative_to(ROOT).as_posix(): page for page in find_pages() if python_blocks(page)}
# what `pip install` brings with an extra, by its name there
PROJECT = (ROOT / 'pyproject.toml').read_text(encoding='utf-8')
EXTRAS = set(re.findall(r'"([\w-]+)', PROJECT.partition('[project.optional-dependencies]')[2].partition('\n[')[0]))

each_page = pytest.mark.parametrize('name', list(PAGES))


@each_page
def test_blocks_run(name):
    """With narrow models: tests/documents/run_page.py says which."""
    problem = run_page(PAGES[name], [block for block in blocks_that_run(name) if block.name not in SLOW])
    assert not problem, problem


@pytest.mark.slow
@each_page
def test_blocks_run_at_full_size(name):
    problem = run_page(PAGES[name], blocks_that_run(name), narrow=False)
    assert not problem, problem


def blocks_that_run(name):
    """All of a page but those that are listed, and those that import a package of an extra that is not installed."""
    found = []
    for block in python_blocks(PAGES[name]):
        missing = missing_extras(block.text)
        if missing:
            warnings.warn(f'{block.name} is not run: {", ".join(missing)} is not installed', stacklevel=1)
        elif block.name not in NOT_RUN:
            found.append(block)
    return found


def missing_extras(code: str) -> list[str]:
    """Packages that pyproject.toml has in an extra and that are not here; any other missing package is an error."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or '' for node in nodes if isinstance(node, ast.ImportFrom)]
    packages = sorted({name.partition('.')[0] for name in names})
    return [name for name in packages if name.lower() in EXTRAS and importlib.util.find_spec(name) is None]


def test_lists_name_what_there_is():
    blocks = {block.name for page in PAGES.values() for block in python_blocks(page)}
    assert {name for name in {*NOT_RUN, *SLOW} if name.partition('#')[0] in PAGES} <= blocks
    stems = {page.stem for page in PAGES.values()}
    scripts = [file for when in ('before', 'after') for file in (Path(__file__).parent / when).glob('*.py')]
    assert {file.stem for file in scripts} <= stems and scripts


def test_only_packages_of_extras_may_be_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    assert missing_extras('import mlflow.tracking, no_such_package\nfrom wandb import init') == ['mlflow', 'wandb']
    assert missing_extras('import torch') == []


def test_every_way_of_adding_something_has_an_example():
    sections = re.findall(r'^## (.*)$', (ROOT / 'docs/extending.md').read_text(encoding='utf-8'), re.MULTILINE)
    shown = {block.name.partition('#')[2] for block in python_blocks(ROOT / 'docs/extending.md')}
    without = [section for section in sections if anchor(section) not in shown]
    assert without == ['A key of the configuration, an experiment']


def test_python_is_spelt_one_way():
    """A block of ```py would be left out."""
    spelt = {block.language for page in find_pages() for block in read_blocks(page)}
    assert not {language for language in spelt if language.lower().startswith('py')} - {'python'}


def test_a_wrong_block_is_noticed_at_its_line(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(
        '# Title\n\n```python\nx = 1\n```\n\n## Two\n\n- item\n\n  ```python\n  x += 1\n  assert x == 3\n  ```\n'
    )
    blocks = python_blocks(page, tmp_path)
    assert [(b.name, b.line) for b in blocks] == [('page.md#title', 4), ('page.md#two', 12)]
    assert f'{page}", line 13' in run_page(page, blocks)
    assert not run_page(page, blocks[:1]) and not script('before', page).exists()
