"""Every block of Python in every document runs as printed."""

import re
from pathlib import Path

import pytest

from .markdown import ROOT, anchor, find_pages, python_blocks, read_blocks
from .run_page import run_page, script

# page#section of a block, and why it cannot run in a test
NOT_RUN: dict[str, str] = {}
PAGES = {page.relative_to(ROOT).as_posix(): page for page in find_pages() if python_blocks(page)}

each_page = pytest.mark.parametrize('name', list(PAGES))


@each_page
def test_blocks_run(name):
    """With narrow models: tests/documents/run_page.py says which."""
    problem = run_page(PAGES[name], blocks_that_run(name))
    assert not problem, problem


@pytest.mark.slow
@each_page
def test_blocks_run_at_full_size(name):
    problem = run_page(PAGES[name], blocks_that_run(name), narrow=False)
    assert not problem, problem


def blocks_that_run(name):
    return [block for block in python_blocks(PAGES[name]) if block.name not in NOT_RUN]


def test_lists_name_what_there_is():
    blocks = {block.name for page in PAGES.values() for block in python_blocks(page)}
    assert set(NOT_RUN) <= blocks
    stems = {page.stem for page in PAGES.values()}
    scripts = [file for when in ('before', 'after') for file in (Path(__file__).parent / when).glob('*.py')]
    assert {file.stem for file in scripts} <= stems and scripts


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
