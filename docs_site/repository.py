"""Links that work on GitHub, in the pages of the site: between files of the repository there, of the site here."""

import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .formulas import outside_code

ROOT = Path(__file__).resolve().parents[1]
DOCS = 'docs'
# pages outside docs/, by their place in the site
MOUNTED = {'README.md': 'overview.md', 'CONTRIBUTING.md': 'contributing.md', 'CHANGELOG.md': 'changelog.md'}
FILES = 'files'  # where files outside docs/ that a page links to are copied to
LINK = re.compile(r'(\]\()([^)\s]+)((?: "[^"]*")?\))')
SCHEME = re.compile(r'[a-z]+:|//')


class Links(NamedTuple):
    """What the pages link to that the site has to be given: paths within the repository."""

    files: set[str]
    folders: set[str]


def site_path(path: str) -> str:
    """The place in the site of a file of the repository, and of a folder's page."""
    if path in MOUNTED:
        return MOUNTED[path]
    inside = PurePosixPath(path)
    if (ROOT / path).is_dir():
        inside = inside / 'index.md'
    if inside.parts[0] == DOCS:
        return inside.relative_to(DOCS).as_posix()
    return f'{FILES}/{inside.as_posix()}'


def resolve(source: str, target: str) -> str | None:
    """The path within the repository that a link of the page `source` means; None if it is not one of ours."""
    name = target.partition('#')[0]
    if not name or SCHEME.match(name):
        return None
    path = os.path.normpath(os.path.join(os.path.dirname(source), name))
    return path if (ROOT / path).exists() and not path.startswith('..') else None


def relink(text: str, source: str) -> str:
    """The Markdown of a page of the repository with its links as they are in the site."""
    here = site_path(source)

    def change(match: re.Match) -> str:
        path = resolve(source, match[2])
        if path is None:
            return match[0]
        anchor = match[2].partition('#')[1:]
        there = os.path.relpath(site_path(path), os.path.dirname(here) or '.')
        return f'{match[1]}{there}{"".join(anchor)}{match[3]}'

    return outside_code(text, lambda part: LINK.sub(change, part))


def find_links(pages: dict[str, str]) -> Links:
    """Files outside docs/ and folders anywhere that pages (path within the repository → Markdown) link to."""
    links = Links(set(), set())

    def note(part: str, source: str) -> str:
        for match in LINK.finditer(part):
            path = resolve(source, match[2])
            if path is not None and (ROOT / path).is_dir():
                links.folders.add(path)
            elif path is not None and path not in MOUNTED and not path.startswith(f'{DOCS}/'):
                links.files.add(path)
        return part

    for source, text in pages.items():
        outside_code(text, lambda part, source=source: note(part, source))
    for folder in links.folders:
        if not folder.startswith(DOCS):
            links.files.update(f'{folder}/{name}' for name in listed(folder))
    return links


def listed(folder: str) -> list[str]:
    return sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file() and path.name[0] not in '._')


def folder_page(folder: str) -> str:
    """A page for a folder that others link to: its files."""
    return '\n'.join([f'# {folder}', '', *(f'- [{name}]({name})' for name in listed(folder)), ''])
