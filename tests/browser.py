"""A real browser for tests: the system's Chromium, headless, driven by playwright; no network."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
PHONE, DESKTOP = {'width': 360, 'height': 740}, {'width': 1200, 'height': 900}


class Browser:
    """Opens pages from disk and keeps what they complain of."""

    def __init__(self, chromium: Any) -> None:
        self.chromium = chromium
        self.complaints: list[str] = []

    @contextlib.contextmanager
    def open(
        self, file: Path, viewport: dict[str, int] = DESKTOP, ready: str = 'body[data-ready]', **options: Any
    ) -> Iterator[Any]:
        """A page that has drawn itself; fails if it wrote an error to the console, or asked for anything outside."""
        context = self.chromium.new_context(viewport=viewport, offline=True, **options)
        page = context.new_page()
        page.on('console', lambda message: self._note(message.type, message.text))
        page.on('pageerror', lambda error: self.complaints.append(str(error)))
        page.on('request', lambda request: self._check(request.url))
        try:
            page.goto(file.resolve().as_uri())
            page.wait_for_selector(ready, state='attached', timeout=20_000)
            yield page
        finally:
            context.close()
        assert not self.complaints, self.complaints

    def _note(self, kind: str, text: str) -> None:
        if kind in ('error', 'warning'):
            self.complaints.append(text)

    def _check(self, url: str) -> None:
        if not url.startswith(('file:', 'data:', 'blob:')):
            self.complaints.append(f'asked for {url}')


@contextlib.contextmanager
def start_browser() -> Iterator[Browser]:
    playwright = pytest.importorskip('playwright.sync_api', reason='playwright is not installed')
    if CHROMIUM is None:
        pytest.skip('no Chromium on this machine')
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox', '--disable-gpu'])
        try:
            yield Browser(chromium)
        finally:
            chromium.close()


def fits_the_width(page: Any) -> bool:
    """No horizontal scrolling."""
    return page.evaluate('document.documentElement.scrollWidth <= document.documentElement.clientWidth')


def pixels_of(page: Any, selector: str) -> str:
    """What a canvas shows, to be compared with itself."""
    return page.evaluate('selector => document.querySelector(selector).toDataURL()', selector)
