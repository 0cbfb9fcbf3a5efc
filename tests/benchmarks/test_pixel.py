"""The pixel benchmark runs and writes its tables. No clock is asserted here."""

import csv

from benchmarks import pixel


def test_quick_run_writes_tables_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pixel.QUICK, 'model', {'img_size': 4, 'embed_dim': 16, 'num_heads': 2, 'depth': 1})
    pixel.main(['--quick', '--output', str(tmp_path)])
    training = list(csv.DictReader((tmp_path / 'quick_pixel_training.csv').open()))
    assert {r['model'] for r in training} == {pixel.NPRF, pixel.SOFTMAX}
    decoding = list(csv.DictReader((tmp_path / 'quick_pixel_decoding.csv').open()))
    assert all(float(r['value']) >= 0 for r in training + decoding)
    assert (tmp_path / 'quick_pixel.png').stat().st_size > 10_000
    assert not any(r['target'] or r['kept'] for r in training + decoding)  # targets are about the full size
    assert 'target' not in capsys.readouterr().out
