"""What mkdocs does not do by itself: pages outside docs/, the API reference, formulas, and pages nobody listed."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `mkdocs` alone does not look here

from mkdocs.exceptions import PluginError  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402

from docs_site.api_pages import api_pages  # noqa: E402
from docs_site.formulas import draw_formulas  # noqa: E402
from docs_site.repository import DOCS, MOUNTED, ROOT, find_links, folder_page, relink, site_path  # noqa: E402

FURTHER = 'Further pages'
ASSETS = ('iframe-worker.js', 'site.css')


def on_config(config: Any) -> Any:
    """The reference, and pages that mkdocs.yml does not name: a new page needs no line there to be found."""
    reference = [{page.removeprefix('api/').removesuffix('.md'): page} for page in api_pages()]
    config.nav = [{key: reference if value == 'API' else value} for entry in config.nav for key, value in entry.items()]
    named = set(_leaves(config.nav))
    unnamed = [path.name for path in sorted((ROOT / DOCS).glob('*.md')) if path.name not in named]
    if unnamed:
        config.nav.append({FURTHER: unnamed})
    return config


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in _leaves(part)]


def on_files(files: Files, config: Any) -> Files:
    pages = {path: (ROOT / path).read_text(encoding='utf-8') for path in MOUNTED}
    pages |= {f'{DOCS}/{file.src_uri}': file.content_string for file in files.documentation_pages()}
    links = find_links(pages)
    for path in MOUNTED:
        files.append(File.generated(config, MOUNTED[path], content=pages[path]))
    for path in sorted(links.folders):
        files.append(File.generated(config, site_path(path), content=folder_page(path)))
    for path in sorted(links.files):
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    for place, text in api_pages().items():
        files.append(File.generated(config, place, content=text))
    for name in ASSETS:
        files.append(File.generated(config, f'assets/{name}', abs_src_path=str(Path(__file__).with_name(name))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    mounted = {place: path for path, place in MOUNTED.items()}
    place = page.file.src_uri
    if place.startswith('api/') or place.endswith('/index.md'):
        return markdown
    source = mounted.get(place, f'{DOCS}/{place}')
    try:
        return draw_formulas(relink(_without_marks(markdown), source))
    except ValueError as error:
        raise PluginError(f'{source}: {error}') from None


def _without_marks(markdown: str) -> str:
    """Tables that a program writes stand between comments, which keep Markdown from seeing a table below them."""
    return re.sub(r'^<!-- (?:table \w+|end) -->$', '', markdown, flags=re.MULTILINE)
