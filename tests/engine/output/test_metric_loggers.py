"""The key `log`: TensorBoard, Weights & Biases offline, MLflow's file store; and none of them can end a run."""

import importlib.util
import json

import pytest

from nprf_vit.config.yaml_file import make_config
from nprf_vit.engine.output import metric_loggers
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.engine.output.metric_loggers import LoggerEntry, MetricLogger, check_loggers, wanted_loggers
from nprf_vit.errors import InputError
from tests.engine.running import run_here, small_config

SHORT = {'global_batch': 512, 'warmup_epochs': 0, 'log_interval': 2}


def test_the_older_key_still_asks_for_tensorboard():
    assert wanted_loggers(make_config({'model': 'm'})) == []
    assert wanted_loggers(make_config({'model': 'm', 'tensorboard': True})) == ['tensorboard']
    assert wanted_loggers(make_config({'model': 'm', 'tensorboard': True, 'log': ['tensorboard']})) == ['tensorboard']
    assert wanted_loggers(make_config({'model': 'm'}, ['log=[csv, wandb, mlflow]'])) == ['wandb', 'mlflow']
    with pytest.raises(InputError, match="log 'comet' is none of csv, tensorboard, wandb, mlflow"):
        make_config({'model': 'm', 'log': ['comet']})


@pytest.mark.parametrize('name', ['tensorboard', 'wandb', 'mlflow'])
def test_what_is_not_installed_is_told_at_the_start(tmp_path, monkeypatch, name):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda package: None if package == name else found(package))
    with pytest.raises(InputError, match=f'log: {name} needs the package {name}: install nprf_vit.{name}.'):
        run_here(tmp_path / 'run', log=[name], **SHORT)
    assert not (tmp_path / 'run').exists()


def test_a_folder_of_the_name_is_no_package(tmp_path, monkeypatch):
    """wandb makes a folder wandb where it runs, which Python would import."""
    (tmp_path / 'lonely_logger').mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec('lonely_logger') is not None
    monkeypatch.setitem(metric_loggers.LOGGERS, 'wandb', LoggerEntry('lonely_logger', MetricLogger))
    with pytest.raises(InputError, match='needs the package lonely_logger'):
        check_loggers(small_config(log=['wandb']))


def test_mlflow_has_every_epoch_of_a_continued_run(tmp_path, monkeypatch):
    pytest.importorskip('mlflow')
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv('MLFLOW_TRACKING_URI', (tmp_path / 'store').as_uri())
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    monkeypatch.setenv('MLFLOW_DISABLE_TELEMETRY', 'true')
    run_here(tmp_path / 'run', log=['mlflow'], stop_at=4, **SHORT)
    run_here(tmp_path / 'run', log=['mlflow'], resume='auto', **SHORT)
    run_id = json.loads((tmp_path / 'run' / 'loggers.json').read_text())['mlflow']
    client = MlflowClient()
    run = client.get_run(run_id)
    assert run.info.status == 'FINISHED' and run.data.params['model'] == 'nprf_deit_tiny'
    rows = read_rows(tmp_path / 'run' / 'summary.csv')
    history = client.get_metric_history(run_id, 'epoch/top1')
    assert [(metric.step, metric.value) for metric in history] == [(int(r['step']), float(r['top1'])) for r in rows]
    assert len(rows) == 2 and client.get_metric_history(run_id, 'train/loss')


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    run_here(tmp_path / 'run', log=['wandb'], stop_at=4, **SHORT)
    first = json.loads((tmp_path / 'run' / 'loggers.json').read_text())['wandb']
    run_here(tmp_path / 'run', log=['wandb'], resume='auto', **SHORT)
    assert json.loads((tmp_path / 'run' / 'loggers.json').read_text())['wandb'] == first
    files = list((tmp_path / 'run' / 'wandb').glob(f'offline-run-*/run-{first}.wandb'))
    content = b''.join(file.read_bytes() for file in files)
    assert b'epoch/top1' in content and b'train/loss' in content and b'nprf_deit_tiny' in content


class Breaking(MetricLogger):
    def __init__(self, config, folder, step, run_id):
        if config.seed == 1:
            raise ConnectionError('not logged in')

    def log(self, group, values, step, epoch):
        raise ConnectionError('the service is gone')

    def close(self, finished):
        raise AssertionError('it was left out')


def test_a_service_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(metric_loggers.LOGGERS, 'wandb', LoggerEntry('json', Breaking))
    assert run_here(tmp_path / 'run', log=['wandb'], **SHORT)['epoch'] == 2
    told = [line for line in capsys.readouterr().out.splitlines() if 'wandb' in line]
    assert told == ['no more metrics go to wandb: ConnectionError: the service is gone']
    with pytest.raises(InputError, match='log: cannot start wandb: ConnectionError: not logged in'):
        run_here(tmp_path / 'other', log=['wandb'], seed=1, **SHORT)
