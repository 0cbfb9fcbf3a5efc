"""The explorer's page in a real browser: pointing, clicking and typing change the picture."""

import numpy as np
import pytest
import torch

from nprf_vit.explore.__main__ import main
from nprf_vit.explore.attention_rows import attention_rows, dequantize, quantize
from nprf_vit.explore.loading import Wanted, load
from nprf_vit.explore.pictures import pictures_of_data, prepare
from tests.browser import PHONE, fits_the_width, pixels_of, start_browser
from tests.engine.running import ROOT

DIGITS = ROOT / 'docs/results/digits/model.safetensors'
PICTURE, HEADS = '.panel .stage canvas', '.tiles button'
pytestmark = pytest.mark.browser


@pytest.fixture(scope='module')
def browser():
    with start_browser() as found:
        yield found


@pytest.fixture(scope='module')
def digits_page(tmp_path_factory):
    page = tmp_path_factory.mktemp('explore') / 'digits.html'
    assert main(['--checkpoint', str(DIGITS), '--output', str(page)]) == 0
    return page


def test_pointing_and_clicking_change_the_picture(browser, digits_page):
    with browser.open(digits_page) as page:
        assert page.locator('.panel').count() == 2, 'two resolutions side by side'
        assert page.locator('.predictions li').count() == 10
        shown = [pixels_of(page, PICTURE)]
        box = page.locator(PICTURE).first.bounding_box()
        page.mouse.move(box['x'] + 10, box['y'] + 10)
        shown.append(pixels_of(page, PICTURE))
        assert 'row 1, column 1' in page.locator('.readout').first.inner_text()
        page.mouse.click(box['x'] + 0.9 * box['width'], box['y'] + 0.9 * box['height'])
        shown.append(pixels_of(page, PICTURE))
        page.mouse.move(box['x'] + 10, box['y'] + 10)  # held: pointing elsewhere changes nothing
        assert pixels_of(page, PICTURE) == shown[-1]
        assert 'row 4, column 4' in page.locator('.readout').first.inner_text()
        assert 'row 8, column 8' in page.locator('.readout').nth(1).inner_text(), 'the same place at the other size'
        page.locator(HEADS).nth(7).click()
        shown.append(pixels_of(page, PICTURE))
        assert 'layer 2, head 2' in page.locator('.readout').first.inner_text()
        page.locator('.images button').nth(1).click()
        page.wait_for_function('old => document.querySelector(".panel canvas").toDataURL() !== old', arg=shown[-1])
        assert len(set(shown)) == len(shown)


def test_keys(browser, digits_page):
    with browser.open(digits_page) as page:
        page.keyboard.press('ArrowUp')
        page.keyboard.press('ArrowRight')
        assert 'row 2, column 4' in page.locator('.readout').first.inner_text()
        for key, told in ((']', 'layer 2, mean'), ('.', 'layer 2, head 1'), ('a', 'layer 2, mean'), ('[', 'layer 1')):
            page.keyboard.press(key)
            assert told in page.locator('.readout').first.inner_text()
        before = page.evaluate('document.documentElement.dataset.theme')
        page.keyboard.press('t')
        assert {before, page.evaluate('document.documentElement.dataset.theme')} == {'light', 'dark'}
        page.keyboard.press('n')
        page.wait_for_selector('.images button:nth-child(2)[aria-pressed=true]')


def test_phone_and_dark(browser, digits_page):
    with browser.open(digits_page, PHONE, color_scheme='dark', has_touch=True, is_mobile=True) as page:
        assert fits_the_width(page)
        dark = page.evaluate('getComputedStyle(document.body).backgroundColor')
        assert sum(map(int, dark[4:-1].split(','))) < 150
        before = pixels_of(page, PICTURE)
        box = page.locator(PICTURE).first.bounding_box()
        page.touchscreen.tap(box['x'] + 5, box['y'] + 5)
        assert pixels_of(page, PICTURE) != before
    with browser.open(digits_page, color_scheme='light') as page:
        light = page.evaluate('getComputedStyle(document.body).backgroundColor')
        assert sum(map(int, light[4:-1].split(','))) > 600


def test_the_browser_has_the_rows_of_the_model(browser, digits_page):
    """Every number on the way: quantized, packed, unpacked, and averaged over heads."""
    loaded = load(Wanted(str(DIGITS)))
    picture = pictures_of_data(loaded.config, 4)[0]
    rows = attention_rows(loaded.model, prepare(loaded, picture)[0], torch.arange(16)).rows
    expected = dequantize(quantize(rows))
    with browser.open(digits_page) as page:
        script = '([l, h, q]) => Array.from(panels[0].loaded.rows.row(l, h, q))'
        for layer, head, query in ((0, 0, 0), (3, 2, 5), (1, 3, 15)):
            row = np.array(page.evaluate(script, [layer, head, query]))
            assert np.allclose(row, expected[layer, head, query].numpy(), atol=1e-6)
            assert not np.allclose(row, expected[layer, head, query - 1].numpy(), atol=1e-3), 'another row is noticed'
        mean = np.array(page.evaluate(script, [2, -1, 7]))
        assert np.allclose(mean, expected[2, :, 7].mean(0).numpy(), atol=1e-6)
        assert abs(mean.sum() - 1) < 0.02


def test_a_broken_page_is_noticed(browser, digits_page, tmp_path):
    broken = tmp_path / 'broken.html'
    text = digits_page.read_text(encoding='utf-8')
    broken.write_text(text.replace('await showBiases(data);', 'await showBiases(data); console.error("oh");'))
    with pytest.raises(AssertionError, match='oh'), browser.open(broken):
        pass
    browser.complaints.clear()
