"""One process and two processes, with or without accumulation, train alike."""

import pytest
import torch

from nprf_vit.engine.output.csv_file import read_rows
from tests.engine.running import config_file, launch, run_here

CALM = {'drop': 0.0, 'drop_path': 0.0, 'log_interval': 1}


def losses(folder):
    return torch.tensor([float(row['loss']) for row in read_rows(folder / 'steps.csv')], dtype=torch.float64)


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp('alone')
    row = run_here(folder, batch_size=128, **CALM)
    return folder, row


def test_two_processes_give_the_same_losses(alone, tmp_path):
    file = config_file(tmp_path, batch_size=16, workers=1, **CALM)
    launch('train.py', '--config', file, '--output', tmp_path / 'out', processes=2)
    one, two = losses(alone[0]), losses(tmp_path / 'out')
    assert len(one) == 22
    torch.testing.assert_close(two, one, atol=1e-5, rtol=0)
    assert one.std() > 1e-3  # the losses move, so agreement says something
    last = read_rows(tmp_path / 'out' / 'summary.csv')[-1]
    assert int(last['images']) == 360
    assert float(last['ema_loss']) == pytest.approx(alone[1]['ema_loss'], abs=1e-5)


@pytest.mark.parametrize('batch_size', [64, 8])
def test_accumulation_gives_the_same_losses(alone, tmp_path, batch_size):
    run_here(tmp_path, batch_size=batch_size, validation_batch_size=128, **CALM)
    torch.testing.assert_close(losses(tmp_path), losses(alone[0]), atol=1e-5, rtol=0)


def test_another_mixing_block_is_noticed(alone, tmp_path):
    run_here(tmp_path, batch_size=128, mixup_block=16, **CALM)
    assert (losses(tmp_path) - losses(alone[0])).abs().max() > 1e-3
