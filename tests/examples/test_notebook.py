"""The notebook as it lies there has been executed, in order and without complaint; the slow test executes it anew."""

import json
import re

import pytest

from ..engine.running import ROOT

PATH = ROOT / 'examples' / 'from_equation_to_2048_px.ipynb'


def text_of(cell) -> str:
    return ''.join(''.join(output['text']) for output in cell['outputs'] if output['output_type'] == 'stream')


@pytest.fixture(scope='module')
def cells():
    return [cell for cell in json.loads(PATH.read_text(encoding='utf-8'))['cells'] if cell['cell_type'] == 'code']


def test_it_was_executed_in_order(cells):
    assert [cell['execution_count'] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell['outputs']]
    assert {output['output_type'] for output in outputs} == {'display_data', 'stream'}
    assert {output['name'] for output in outputs if output['output_type'] == 'stream'} == {'stdout'}


def test_it_has_pictures_and_is_small(cells):
    pictures = [output for cell in cells for output in cell['outputs'] if 'image/png' in output.get('data', {})]
    assert len(pictures) >= 5 and PATH.stat().st_size < 1_000_000


def test_it_shows_what_it_says(cells):
    text = '\n'.join(text_of(cell) for cell in cells)
    errors = [float(found) for found in re.findall(r'float32 (\S+),', text)]
    assert len(errors) == 4 and max(errors) < 1e-5
    assert 'tokens 16384' in text and 'finite: True' in text
    scores = dict(re.findall(r'^(\w+) +(98.61) ', text, re.MULTILINE))
    assert set(scores) == {'interpolate', 'cells', 'extend'}  # one model at the resolution of the training


@pytest.mark.slow
def test_it_runs_anew(cells):
    nbformat, nbclient = pytest.importorskip('nbformat'), pytest.importorskip('nbclient')
    notebook = nbformat.read(PATH, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=1500, kernel_name='python3', resources={'metadata': {'path': ROOT}}
    ).execute()
    anew = [cell for cell in notebook.cells if cell.cell_type == 'code']

    def table(cells):
        return re.findall(r'^(?:interpolate|cells|extend) +[\d. ]+$', '\n'.join(map(text_of, cells)), re.MULTILINE)

    for before, after in zip(table(cells), table(anew), strict=True):
        name, *scores = before.split()
        assert after.split()[0] == name
        assert [float(x) for x in after.split()[1:]] == pytest.approx([float(x) for x in scores], abs=1.2)
