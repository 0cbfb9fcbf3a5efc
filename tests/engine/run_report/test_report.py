"""`python -m nprf_vit.report`: what the page shows of runs, in a real browser too, and folders that are none."""

import fcntl
import json
import os
import shutil

import pytest

from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.report import main
from tests.browser import PHONE, fits_the_width, start_browser
from tests.engine.running import ROOT, run_here
from tests.explore.test_page import data_of

SHORT = {'global_batch': 512, 'warmup_epochs': 0, 'log_interval': 1}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    run_here(folder / 'slow', lr=1e-4, **SHORT)
    run_here(folder / 'quick', lr=1e-2, **SHORT)
    return folder


@pytest.fixture(scope='module')
def two(runs):
    page = runs / 'two.html'
    assert main([str(runs / 'slow'), str(runs / 'quick'), '--output', str(page)]) == 0
    return page


def test_two_runs(runs, two):
    data = data_of(two)
    assert [run['name'] for run in data['runs']] == ['slow', 'quick']
    assert data['settings'] == [{'key': 'lr', 'values': ['0.0001', '0.01']}]
    for run in data['runs']:
        rows = read_rows(runs / run['name'] / 'summary.csv')
        assert run['epochs']['top1'] == [float(row['top1']) for row in rows]
        assert run['state'] == 'finished' and len(run['biases']) == 3 and run['hard_images']['worst']
        facts = {fact['name']: fact['value'] for fact in run['facts']}
        assert facts['skipped steps'] == '0' and float(facts['last top1']) == pytest.approx(
            float(rows[-1]['top1']), rel=1e-4
        )


def test_one_run_has_its_report_and_its_keys(runs):
    data = data_of(runs / 'slow' / 'report.html')
    keys = {row['key']: row['values'][0] for row in data['settings']}
    assert keys['lr'] == '0.0001' and 'depth: 2' in keys['model_kwargs'] and 'weight_decay' in keys
    assert 'sched' not in keys, 'at its default'


def test_published_runs_have_a_report(tmp_path):
    page = tmp_path / 'page.html'
    assert main([str(ROOT / 'docs/results/digits'), '--output', str(page)]) == 0
    assert data_of(page)['runs'][0]['steps'] == {}


def test_images_on_demand(runs, tmp_path):
    """For a run whose last evaluation was not noted: best.pt is evaluated, which after its last epoch says the same."""
    folder = shutil.copytree(runs / 'quick', tmp_path / 'quick')
    noted = json.loads((folder / 'validation.json').read_text())
    (folder / 'validation.json').unlink()
    page = tmp_path / 'page.html'
    assert main([str(folder), '--images', '--output', str(page)]) == 0
    found = data_of(page)['runs'][0]['hard_images']
    rows = read_rows(folder / 'summary.csv')
    if float(rows[1]['top1']) > float(rows[0]['top1']):
        assert [one['index'] for one in found['worst']] == [one['index'] for one in noted['worst']]
    assert found['worst'][0]['target'] in '0123456789'


def test_faults_are_shown(runs, tmp_path):
    folder = shutil.copytree(runs / 'slow', tmp_path / 'slow')
    (folder / 'bad_images.csv').write_text('index,problem\n7,cannot read <b>\n')
    record = {'step': 3, 'reason': 'loss', 'images': [1, 2], 'suspects': [2]}
    (folder / 'skipped_steps.jsonl').write_text(json.dumps(record) + '\n{"step": 4, "rea')
    page = tmp_path / 'page.html'
    assert main([str(folder), '--output', str(page)]) == 0
    run = data_of(page)['runs'][0]
    assert run['bad_images']['first'] == [{'index': '7', 'problem': 'cannot read <b>'}]
    assert run['skipped']['first'] == [{'step': 3, 'reason': 'loss', 'suspects': [2]}]


def test_a_run_under_way(runs, tmp_path, capsys):
    folder = shutil.copytree(runs / 'slow', tmp_path / 'slow')
    lines = (folder / 'summary.csv').read_text().splitlines(keepends=True)
    (folder / 'summary.csv').write_text(''.join(lines[:2]))
    steps = (folder / 'steps.csv').read_text()
    (folder / 'steps.csv').write_text(steps[:-3])  # a line that is being written
    page = tmp_path / 'page.html'
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert main([str(folder), '--output', str(page)]) == 0
        assert 'under way, epoch 1 of 2' in capsys.readouterr().out
    finally:
        os.close(descriptor)
    assert main([str(folder), '--output', str(page)]) == 0
    assert 'stopped, epoch 1 of 2' in capsys.readouterr().out
    assert len(data_of(page)['runs'][0]['steps']['step']) == steps.count('\n') - 2


def broken(file, change):
    def work(folder):
        text = (folder / file).read_text(encoding='utf-8') if (folder / file).exists() else ''
        (folder / file).write_bytes(change(text))

    return work


BAD = {
    'no such run': (shutil.rmtree, 'no such run: there is no folder'),
    'a file': (lambda folder: (shutil.rmtree(folder), folder.write_text('')), 'is a file, expected the folder'),
    'empty': (lambda folder: (shutil.rmtree(folder), folder.mkdir()), 'holds no run: expected config.yaml'),
    'no epoch yet': (lambda folder: (folder / 'summary.csv').unlink(), 'has not finished an epoch'),
    'a cell that is no number': (
        broken('summary.csv', lambda t: t.replace('\n1,', '\nx,').encode()),
        'expected a number',
    ),
    'a short row': (broken('summary.csv', lambda t: (t + '3,4\n').encode()), 'summary.csv:4 is damaged: 2 cells'),
    'other columns': (
        broken('summary.csv', lambda t: b'a,b\n1,2\n'),
        'its first line has no epoch, step, lr, train_loss',
    ),
    'no rows': (broken('summary.csv', lambda t: t.splitlines(keepends=True)[0].encode()), 'it has no row'),
    'no text': (broken('summary.csv', lambda t: b'\xff\xfe\n'), 'summary.csv is damaged'),
    'quotes': (broken('steps.csv', lambda t: (t + '"1\n').encode()), 'steps.csv is damaged'),
    'no JSON': (broken('launches.json', lambda t: b'[{'), 'launches.json is damaged'),
    'bias': (broken('rel_pos_bias.jsonl', lambda t: b'{}\n'), 'rel_pos_bias.jsonl:1 is damaged'),
    'images': (broken('validation.json', lambda t: b'{}'), 'validation.json is damaged'),
    'configuration': (broken('config.yaml', lambda t: b'modell: a'), 'unknown key modell'),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input_is_one_line(case, runs, tmp_path, capsys):
    folder = shutil.copytree(runs / 'slow', tmp_path / 'slow')
    work, told = BAD[case]
    work(folder)
    assert main([str(folder), '--output', str(tmp_path / 'page.html')]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count('\n') == 1 and error.startswith('error: ')
    assert not (tmp_path / 'page.html').exists()


def test_what_is_no_number_is_left_out_of_the_curves(runs, tmp_path):
    folder = shutil.copytree(runs / 'slow', tmp_path / 'slow')
    rows = read_rows(folder / 'summary.csv')
    text = (folder / 'summary.csv').read_text().replace(rows[0]['train_loss'], 'nan')
    (folder / 'summary.csv').write_text(text)
    line = {'epoch': 1, 'step': 1, 'tables': {'rel_pos_bias': {'distance': [0], 'heads': [[float('nan')]]}}}
    (folder / 'rel_pos_bias.jsonl').write_text(json.dumps(line) + '\n')
    assert main([str(folder), '--output', str(tmp_path / 'page.html')]) == 0
    run = data_of(tmp_path / 'page.html')['runs'][0]
    assert run['epochs']['train_loss'][0] is None and run['biases'][0]['tables']['rel_pos_bias']['heads'] == [[None]]


@pytest.mark.browser
def test_in_a_browser(runs, two):
    with start_browser() as browser:
        with browser.open(two) as page:
            assert page.locator('#curves figure').count() == 5
            assert page.locator('#curves polyline').count() == 3 * 2 + 2 * 2 + 3 * 2
            before = page.locator('#curves').inner_html()
            page.keyboard.press('l')
            assert page.locator('#curves').inner_html() != before, 'losses on a logarithmic axis'
            page.keyboard.press('x')
            assert 'step' in page.locator('#curves figure').first.inner_text()
            page.locator('#runs button').first.click()
            assert page.locator('#curves polyline').count() == 3 + 2 + 3
            box = page.locator('#curves svg').first.bounding_box()
            page.mouse.move(box['x'] + box['width'] / 2, box['y'] + box['height'] / 2)
            assert 'quick, training ' in page.locator('#curves .keys').first.inner_text()
            assert page.locator('#bias figure').count() == 2, 'a chart per head'
            loaded = 'Array.from(document.images).every(image => image.complete && image.naturalWidth > 0)'
            assert page.locator('.gallery img').count() > 16 and page.evaluate(loaded)
        with browser.open(runs / 'slow' / 'report.html', PHONE, color_scheme='dark') as page:
            assert fits_the_width(page)
            assert page.evaluate('document.documentElement.dataset.theme') == 'dark'
