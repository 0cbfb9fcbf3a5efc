"""Where results go, and how those of a quick run are told from others."""

import importlib

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from benchmarks import report

SPEED = ('attention', 'budget', 'length', 'models', 'peers', 'pixel', 'window', 'zoo')
CLAIMS = ('approximation', 'dense_features', 'expressiveness')
COMMANDS = [*(f'benchmarks.{name}' for name in SPEED), *(f'experiments.{name}' for name in CLAIMS)]


@pytest.mark.parametrize('name', COMMANDS)
def test_a_quick_run_keeps_away_from_the_results(name, capsys):
    with pytest.raises(SystemExit, match='2'):
        importlib.import_module(name).main(['--quick', '--output', str(report.RESULTS)])
    assert capsys.readouterr().err.startswith('error: a quick run gives no results')


def test_results_go_to_a_new_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = report.options('').parse_args([])
    first = report.Report.of(args, 'x')
    first.save({'x': [{'a': 1}]})
    second = report.Report.of(args, 'x')
    assert first.folder != second.folder and first.folder.parent == second.folder.parent == report.OUTPUT
    assert report.read_csv(first.folder / 'x.csv') == [{'a': 1}]
    assert report.Report.of(report.options('').parse_args(['--quick']), 'x').folder is None


def test_tables_and_pictures_of_a_quick_run_say_so(tmp_path, capsys):
    pictures = []
    for quick in (False, True):
        place = report.Report(tmp_path, quick)
        place.table([{'model': 'a', 'top-1': 3}])
        place.save({'x': [{'model': 'a'}]}, {'x': lambda path: report.save_figure(Figure(), path)})
        assert (f'| model ({report.LABEL}) |' in capsys.readouterr().out) == quick
        pictures.append(imread(place.path('x.png')))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['quick_x.csv', 'quick_x.png', 'x.csv', 'x.png']
    blank, labelled = (np.unique(picture.reshape(-1, 4), axis=0) for picture in pictures)
    assert len(blank) == 1 < len(labelled)
