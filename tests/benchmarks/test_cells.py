"""The benchmark of cells runs and judges its targets. No clock is asserted here."""

import csv

from benchmarks import cells


def test_quick_run_writes_a_table_and_a_picture(tmp_path, capsys):
    cells.main(['--quick', '--output', str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / 'quick_cells.csv').open()))
    assert [(r['side'], r['mode']) for r in rows] == [
        ('12', 'forward'),
        ('13', 'forward'),
        ('12', 'forward+backward'),
    ]
    assert float(rows[0]['speedup']) > 0 and rows[1]['speedup'] == '' and float(rows[2]['over_no_bias']) > 0
    assert (tmp_path / 'quick_cells.png').stat().st_size > 10_000
    assert 'target' not in capsys.readouterr().out


def test_targets_are_judged(capsys):
    row = {'side': 112, 'mode': 'forward', 'us_per_token': 30.0, 'peak_mb': 10.0, 'least': 25.0, 'most': 2.2}
    cells.show([row | {'speedup': 24.0, 'over_no_bias': 2.1}, row | {'speedup': 26.0, 'over_no_bias': 2.3}])
    out = capsys.readouterr().out
    assert out.count('MISSED') == 2 and out.count('met') == 2
