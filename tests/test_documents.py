"""Documents: prose of at most 100 columns, and no link, file, test or module that does not exist."""

import re
from pathlib import Path

import pytest

from tests.documents.markdown import find_pages

ROOT = Path(__file__).resolve().parents[1]
PAGES = find_pages()
FILE = re.compile(r'`((?:nprf_vit|tests|configs|docs|benchmarks|experiments|examples|slurm|\.ci|\.github)/[\w./-]+)`')
MODULE = re.compile(r'python -m ((?:nprf_vit|benchmarks|experiments|tests)[\w.]*)')
TESTS = '\n'.join(path.read_text(encoding='utf-8') for path in (ROOT / 'tests').rglob('test_*.py'))
WIDTH = 100

pages = pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)


def prose(text: str) -> list[str]:
    """The lines but for code, tables, formulas, pictures and what has no space to break at."""
    text = re.sub(r'^```.*?^```|^\$\$.*?\$\$$', '', text, flags=re.S | re.M)
    lines = [line for line in text.splitlines() if not line.startswith(('|', '![', '#'))]
    return [line for line in lines if ' ' in line.strip().lstrip('- ')]


@pages
def test_prose_is_wrapped(page):
    if page.name == 'configuration.md':
        pytest.skip('generated from the schema')
    assert [line for line in prose(page.read_text(encoding='utf-8')) if len(line) > WIDTH] == []


def test_a_long_line_is_noticed():
    long = 'word ' * 21
    assert prose(f'{long}\n```\n{long}\n```\n| {long}\n') == [long]


@pages
def test_links_lead_somewhere(page):
    text = page.read_text(encoding='utf-8')
    targets = [t for t in re.findall(r'\]\(([^)\s]+)\)', text) if not t.startswith('http')]
    missing = []
    for target in targets:
        name, _, anchor = target.partition('#')
        path = (page.parent / name) if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(target)
    assert missing == []


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r'^#+ (.*)$', path.read_text(encoding='utf-8'), re.M)
    return {re.sub(r'[^\w\- ]', '', head.lower()).replace(' ', '-') for head in heads}


@pages
def test_files_and_modules_exist(page):
    text = page.read_text(encoding='utf-8')
    names = {name.split('::')[0] for name in FILE.findall(text)}
    assert [name for name in names if not (ROOT / name).exists()] == []
    modules = {name.rstrip('.').replace('.', '/') for name in MODULE.findall(text)}
    assert [m for m in modules if not ((ROOT / f'{m}.py').exists() or (ROOT / m / '__main__.py').exists())] == []


@pages
def test_tests_that_are_named_exist(page):
    named = re.findall(r'`(test_\w+)`', page.read_text(encoding='utf-8'))
    assert [name for name in named if f'def {name}(' not in TESTS] == []
