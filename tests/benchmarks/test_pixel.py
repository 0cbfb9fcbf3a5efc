"""The pixel benchmark runs and writes its tables. No clock is asserted here."""

import csv

from benchmarks import pixel


def test_quick_run_writes_tables_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pixel.QUICK, 'model', {'img_size': 4, 'embed_dim': 16, 'num_heads': 2, 'depth': 1})
    pixel.main(['--quick', '--output', str(tmp_path)])
    training = list(csv.DictReader((tmp_path / 'pixel_training.csv').open()))
    assert {r['model'] for r in training} == {pixel.NPRF, pixel.SOFTMAX}
    assert [r['target'] for r in training if r['target']] == ['<= 1.1', '<= 0.5']
    decoding = list(csv.DictReader((tmp_path / 'pixel_decoding.csv').open()))
    assert [r['target'] for r in decoding if r['target']] == ['>= 100', '<= 1.1']
    assert all(float(r['value']) >= 0 for r in training + decoding)
    assert (tmp_path / 'pixel.png').stat().st_size > 10_000
    assert 'MISSED' not in capsys.readouterr().out  # promises are about the full size
