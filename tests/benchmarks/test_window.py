"""The window benchmark runs and judges its targets. No clock is asserted here."""

import csv

from benchmarks import window


def test_quick_run_writes_a_table_and_a_picture(tmp_path, capsys):
    window.main(['--quick', '--output', str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / 'quick_window.csv').open()))
    assert [r['side'] for r in rows] == ['12', '16'] and float(rows[0]['speedup']) > 0 and rows[1]['speedup'] == ''
    assert all(float(r['us_per_token']) > 0 for r in rows)
    assert (tmp_path / 'quick_window.png').stat().st_size > 10_000
    assert 'target' not in capsys.readouterr().out


def test_targets_are_judged(capsys):
    row = {'side': 64, 'tokens': 4096, 'us_per_token': 30.0, 'peak_mb': 10.0, 'promised': 2.0}
    window.show([row | {'speedup': 1.9}, row | {'speedup': 2.1, 'us_per_token': 36.0}])
    out = capsys.readouterr().out
    assert out.count('MISSED') == 2 and out.count('met') == 1 and '1.200 (target 1.15: MISSED)' in out
