"""The embedded demo as the README runs it."""

import json

import pytest

from nprf_vit.engine.output.csv_file import read_rows

from ..engine.running import launch


@pytest.mark.slow
def test_digits_reach_their_target_and_validate_to_the_same_number(tmp_path):
    launch('train.py', '--config', 'configs/digits.yaml', '--output', tmp_path / 'out')
    row = read_rows(tmp_path / 'out' / 'summary.csv')[-1]
    assert float(row['top1']) >= 97
    args = '--config', 'configs/digits.yaml', '--checkpoint', tmp_path / 'out' / 'last.pt'
    table = launch('validate.py', *args, '--json', tmp_path / 'v.json').stdout
    written = json.loads((tmp_path / 'v.json').read_text(encoding='utf-8'))
    assert str(written['top1']) == row['top1'] and str(written['ema_loss']) == row['ema_loss']
    assert written['images'] == 360 and 'nprf_deit_tiny' in table
