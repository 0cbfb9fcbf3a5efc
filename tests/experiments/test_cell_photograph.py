"""The features of a photograph: cells have blocks, interpolating has none."""

import pytest
import torch

from benchmarks.report import RESULTS, read_csv
from experiments import cell_photograph


def test_quick_run_writes_a_table_and_a_picture(tmp_path, capsys):
    cell_photograph.main(['--quick', '--output', str(tmp_path)])
    assert (tmp_path / 'quick_cell_photograph.png').stat().st_size > 5_000
    assert '| interpolate |' in capsys.readouterr().out


def test_the_shipped_rows_are_repeated():
    rows, maps = cell_photograph.measure(cell_photograph.SIZE)
    for row, shipped in zip(rows, read_csv(RESULTS / 'cell_photograph.csv'), strict=True):
        assert row['way'] == shipped['way']
        assert row['border_energy'] == pytest.approx(shipped['border_energy'], abs=0.05)
        assert row['from_interpolate'] == pytest.approx(shipped['from_interpolate'], abs=0.02)
    assert all(m.shape == (64, 32, 48) for m in maps.values())


def test_the_models_differ_in_nothing_but_the_way():
    models = [cell_photograph.load((32, 32), *way) for way in cell_photograph.WAYS.values()]
    image = cell_photograph.photograph((32, 32))
    with torch.inference_mode():
        first, *others = (model(image) for model in models)
    for name, other in zip(list(cell_photograph.WAYS)[1:], others):
        if name != 'cells, twice as many':
            torch.testing.assert_close(other, first, msg=name)
