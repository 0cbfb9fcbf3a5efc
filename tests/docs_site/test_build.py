"""The site as it is built: strictly, without network, and in a real browser from disk."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_site.repository import ROOT
from tests.browser import DESKTOP, PHONE, Browser, fits_the_width, start_browser

for package in ('mkdocs', 'material', 'mkdocstrings', 'ziamath'):
    pytest.importorskip(package, reason=f'{package} is not installed: pip install -e ".[docs]"')

# what would leave the machine raises; everything else is the documented command
BUILD = """
import socket, sys

def refuse(*args):
    raise OSError(f'the build asked for the network: {args}')

socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(['build', '--strict', '--site-dir', sys.argv[1]])
"""
OUTSIDE = re.compile(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//[^"]*"|<link[^>]*href="(?:https?:)?//[^"]*"')


def build(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess:
    quiet = os.environ | {'NO_MKDOCS_2_WARNING': '1', 'PYTHONPATH': str(root)}
    command = [sys.executable, '-c', BUILD, str(folder)]
    return subprocess.run(command, cwd=root, env=quiet, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp('site')
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope='module')
def browser():
    with start_browser() as found:
        yield found


def article(site: Path, name: str) -> str:
    return re.search(r'<article.*</article>', (site / f'{name}.html').read_text(encoding='utf-8'), re.DOTALL)[0]


def test_every_document_is_a_page(site):
    names = [path.stem for path in (ROOT / 'docs').glob('*.md')] + ['overview', 'contributing', 'changelog']
    assert [name for name in names if not (site / f'{name}.html').is_file()] == []
    listed = (site / 'index.html').read_text(encoding='utf-8')
    assert [name for name in names if f'href="{name}.html"' not in listed and name != 'index'] == []


def test_nothing_comes_from_elsewhere(site):
    found = {path.name: OUTSIDE.findall(path.read_text(encoding='utf-8')) for path in site.rglob('*.html')}
    assert {name: links for name, links in found.items() if links} == {}
    styles = [path for path in site.rglob('*.css') if re.search(r'url\(["\']?(?:https?:)?//', path.read_text('utf-8'))]
    assert styles == []


def test_formulas_tables_and_code_are_there(site):
    source = (ROOT / 'docs' / 'math.md').read_text(encoding='utf-8')
    page = article(site, 'math')
    assert page.count('class="formula"') == len(re.findall(r'^\$\$', source, re.MULTILINE)) > 5 and '$$' not in page
    assert re.findall(r'\S*[_^]\{\S*', re.sub(r'aria-label="[^"]*"|<code>.*?</code>', '', page)) == []
    for name in ('results', 'backends', 'high_resolution'):
        source = (ROOT / 'docs' / f'{name}.md').read_text(encoding='utf-8')
        assert article(site, name).count('<table') == len(re.findall(r'^\|[-|]+\|$', source, re.MULTILINE))


def test_the_reference_is_filled(site):
    page = article(site, 'api/ops')
    assert 'id="nprf_vit.ops.kernel_attention"' in page and 'features of the queries' in page
    assert 'id="nprf_vit.models.nprf_deit.nprf_deit_base"' in article(site, 'api/models')


@pytest.mark.slow
def test_a_dead_link_stops_the_build(tmp_path):
    for name in (
        'docs',
        'docs_site',
        'nprf_vit',
        'mkdocs.yml',
        'README.md',
        'CONTRIBUTING.md',
        'CHANGELOG.md',
        'configs',
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    docs = tmp_path / 'docs'
    docs.unlink()
    docs.mkdir()
    for path in (ROOT / 'docs').iterdir():
        (docs / path.name).symlink_to(path)
    (docs / 'extra.md').write_text('# Extra\n\n[gone](gone.md), [no such section](math.md#nowhere)\n', encoding='utf-8')
    done = build(tmp_path / 'site', tmp_path)
    assert done.returncode != 0 and 'gone.md' in done.stderr and 'nowhere' in done.stderr


@pytest.mark.browser
@pytest.mark.parametrize(('viewport', 'scheme'), [(DESKTOP, 'light'), (PHONE, 'dark')], ids=['desktop', 'phone'])
def test_pages_open_from_disk(site, browser: Browser, viewport, scheme):
    for name in ('index', 'math', 'api/ops', 'faq', 'overview'):
        with browser.open(site / f'{name}.html', viewport, 'html.js', color_scheme=scheme) as page:
            assert fits_the_width(page), name
            if name == 'math':
                ink = page.evaluate("getComputedStyle(document.querySelector('.formula path')).fill")
                assert ink == page.evaluate("getComputedStyle(document.querySelector('.formula')).color")


@pytest.mark.browser
def test_pictures_show(site, browser: Browser):
    with browser.open(site / 'overview.html', DESKTOP, 'html.js') as page:
        page.wait_for_function("[...document.querySelectorAll('article img')].every(i => i.complete && i.naturalWidth)")


@pytest.mark.browser
def test_the_search_finds_a_page_from_disk(site, browser: Browser):
    with browser.open(site / 'index.html', DESKTOP, 'html.js') as page:
        page.click('.md-search__input')
        page.keyboard.type('flat bias')
        page.wait_for_selector('.md-search-result__link[href*="faq.html"]', timeout=20_000)
