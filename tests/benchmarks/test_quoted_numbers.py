"""What the documents quote is what the CSV files in docs/results have."""

import re
import shutil

import pytest

from benchmarks import report, tables
from benchmarks.report import read_csv
from nprf_vit.engine.output.csv_file import write_rows


@pytest.mark.parametrize('path', tables.documents(), ids=lambda path: path.name)
def test_documents_agree_with_the_csv_files(path):
    text = path.read_text(encoding='utf-8')
    assert tables.update(text, path.name) == text, 'run: python -m benchmarks.tables'


def test_every_table_is_in_a_document_and_every_document_exists():
    named = {
        name for path in tables.documents() for _, name, _ in tables.BLOCK.findall(path.read_text(encoding='utf-8'))
    }
    assert named == set(tables.TABLES)
    assert set(tables.QUOTES) <= {path.name for path in tables.documents()}


def test_the_results_have_no_table_written_by_hand():
    text = (tables.ROOT / 'docs' / 'results.md').read_text(encoding='utf-8')
    heads = re.findall(r'^\|(.*)\|\n\|-', tables.BLOCK.sub('', text), re.M)
    assert heads == [' the paper says | found here | section ']


@pytest.fixture
def other_results(tmp_path, monkeypatch):
    """A copy of docs/results, in which figures may be changed."""
    folder = tmp_path / 'results'
    shutil.copytree(report.RESULTS, folder, ignore=shutil.ignore_patterns('*.png', '*.safetensors'))
    monkeypatch.setattr(report, 'RESULTS', folder)
    return folder


def test_a_changed_figure_is_noticed_and_written(other_results):
    rows = read_csv(other_results / 'models.csv')
    for row in rows:
        if row['pixels'] == 1536 and row['model'] == 'nprf_deit_base':
            row['speed_over_deit'] = 7.77
    write_rows(other_results / 'models.csv', rows)
    for name in ('README.md', 'docs/results.md'):
        old = (tables.ROOT / name).read_text(encoding='utf-8')
        new = tables.update(old, name.split('/')[-1])
        assert '7.77×' not in old and '| 1536 px | 7.77×, ' in new
        assert len(old.splitlines()) == len(new.splitlines())


def test_a_new_table_has_no_lines_yet_and_takes_none_of_what_follows():
    old = '<!-- table codecs -->\n<!-- end -->\n\nText.\n\n<!-- table cell_photograph -->\nold\n<!-- end -->\n'
    new = tables.update(old, 'a.md')
    assert '\n| WebP |' in new and '\n<!-- end -->\n\nText.\n\n<!-- table cell_photograph -->\n| bias |' in new
    assert 'old' not in new and tables.update(new, 'a.md') == new


def test_a_changed_figure_in_a_sentence_is_noticed_and_written(other_results):
    path = other_results / 'fashion_mnist' / 'summary.csv'
    path.write_text(path.read_text().replace('91.81', '81.18'))
    old = (tables.ROOT / 'README.md').read_text(encoding='utf-8')
    assert tables.update(old, 'README.md') == old.replace('top-1 91.81 after', 'top-1 81.18 after') != old


def test_a_sentence_may_be_broken_over_lines_but_not_be_lost():
    words = 'at most {} % more, {} times'
    assert tables.replace_figures('a at\nmost 4 %\nmore, 1.5 times.', words, [5, '2.5'], 'x') == (
        'a at\nmost 5 %\nmore, 2.5 times.'
    )
    with pytest.raises(ValueError, match=r'x has 0 times what benchmarks/quotes.py looks for: at most'):
        tables.replace_figures('at least 4 % more', words, [5, 2], 'x')


def test_the_command_checks_and_updates(tmp_path, monkeypatch, capsys):
    (tmp_path / 'docs').mkdir()
    (tmp_path / 'README.md').write_text('')
    page = tmp_path / 'docs' / 'page.md'
    page.write_text('before\n\n<!-- table window -->\nold\n<!-- end -->\n\nafter\n', encoding='utf-8')
    monkeypatch.setattr(tables, 'ROOT', tmp_path)
    monkeypatch.setattr(tables, 'QUOTES', {})
    assert tables.main(['--check']) == 1
    assert capsys.readouterr().out == 'page.md: disagrees with docs/results\n' and 'old' in page.read_text()
    assert tables.main([]) == 0
    assert 'before\n\n<!-- table window -->\n| grid |' in page.read_text() and 'old' not in page.read_text()
    assert tables.main(['--check']) == 0
