"""The model benchmark runs, keeps the rows it did not measure, and judges its targets. No clock is asserted here."""

import csv

import pytest

from benchmarks import models
from benchmarks.report import read_csv
from nprf_vit.engine.output.csv_file import write_rows


@pytest.mark.slow
def test_quick_run_writes_a_table_and_a_picture(tmp_path):
    models.main(['--quick', '--output', str(tmp_path), '--max-pixels', '64'])
    rows = list(csv.DictReader((tmp_path / 'quick_models.csv').open()))
    assert {r['model'] for r in rows} == {models.OURS, models.DEIT, models.RELPOS, models.SWIN}
    assert all(float(r['seconds']) > 0 and float(r['peak_mb']) > 0 for r in rows)
    assert (tmp_path / 'quick_models.png').stat().st_size > 10_000


def row(pixels, model, deit=1.0, relpos=1.0, peak=100, mode='inference'):
    speeds = {'speed_over_deit': deit, 'speed_over_relpos': relpos}
    seconds = models.NO_FIT if peak == models.NO_FIT else 1.0
    return (
        {'pixels': pixels, 'batch': 1, 'mode': mode, 'model': model, 'seconds': seconds, 'images_per_second': 1.0}
        | speeds
        | {'peak_mb': peak}
    )


def test_rows_of_other_cases_stay(tmp_path):
    write_rows(
        tmp_path / 'quick_x.csv', [row(224, models.OURS), row(512, models.OURS), row(224, models.OURS, mode='training')]
    )
    merged = models.merge(read_csv(tmp_path / 'quick_x.csv'), [row(224, models.OURS, deit=0.5)])
    assert [(r['pixels'], r['mode'], r['speed_over_deit']) for r in merged] == [
        (224, 'inference', 0.5),
        (224, 'training', 1.0),
        (512, 'inference', 1.0),
    ]


def test_a_model_can_be_added(tmp_path, monkeypatch, capsys):
    def measured(index, case, args, progress):
        return [row(case.pixels, name, deit=0.7, mode=case.mode) for name in case.models]

    monkeypatch.setattr(models, 'run_case', measured)
    write_rows(tmp_path / 'quick_models.csv', [row(64, models.OURS), row(64, models.DEIT)])
    models.main(['--quick', '--max-pixels', '64', '--continue', str(tmp_path), '--add', models.SWIN])
    found = [(r['model'], r['mode'], r['speed_over_deit']) for r in read_csv(tmp_path / 'quick_models.csv')]
    assert found[:2] == [(models.OURS, 'inference', 1.0), (models.DEIT, 'inference', 1.0)]
    assert found[2:] == [(models.SWIN, 'inference', 0.7), (models.SWIN, 'training', 0.7)]
    said = f'2 rows taken over from {tmp_path}/quick_models.csv: 64 px inference {models.OURS}, 64 px inference'
    assert said in capsys.readouterr().out


def test_there_must_be_something_to_continue(tmp_path, capsys):
    with pytest.raises(SystemExit, match='2'):
        models.main(['--quick', '--continue', str(tmp_path)])
    assert 'nothing to continue' in capsys.readouterr().err


def test_targets_are_judged(capsys):
    models.show([row(224, models.OURS, deit=0.96), row(1024, models.OURS, relpos=2.1, peak=400)])
    out = capsys.readouterr().out
    assert '0.96x the throughput of deit_base_patch16_224 (target 0.97: MISSED)' in out
    assert '2.1x the throughput of vit_relpos_base_patch16_224 (target 2.0: met)' in out
    assert '400 MB (target 3000: met)' in out
    models.show([row(1024, models.OURS, peak=400), row(1024, models.RELPOS, peak=700)])
    assert '0.57x of vit_relpos_base_patch16_224 (target 0.5: MISSED)' in capsys.readouterr().out
    models.show([row(1024, models.OURS, relpos='', peak=400), row(1024, models.RELPOS, '', '', models.NO_FIT)])
    assert 'peer does not fit' in capsys.readouterr().out
