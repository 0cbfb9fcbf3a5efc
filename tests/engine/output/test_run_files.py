"""What a run leaves behind and says, and what a dry run foretells."""

import json
import os

import pytest
import torch

from nprf_vit.config.yaml_file import load_config
from nprf_vit.engine.checkpoint.file import read_checkpoint, save_checkpoint
from nprf_vit.engine.dry_run.run import dry_run
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.errors import InputError
from tests.data.folders import CLASSES, digit_folder
from tests.engine.running import ONE, config_file, launch, run_here, small_config

FOLDER_RUN = {'dataset': '', 'num_classes': CLASSES, 'global_batch': 32, 'batch_size': 16, 'epochs': 1}


def test_files_of_a_run_on_an_image_folder(tmp_path):
    root = digit_folder(tmp_path / 'data')
    file = config_file(tmp_path, **FOLDER_RUN, warmup_epochs=0, workers=1)
    done = launch('train.py', '--config', file, '--data-dir', root, '--output', tmp_path / 'out', '--set', 'seed=3')
    out = tmp_path / 'out'
    found = {path.name for path in out.iterdir()}
    assert found == {
        'config.yaml',
        'launches.json',
        'last.pt',
        'best.pt',
        'summary.csv',
        'steps.csv',
        'curves.png',
        'report.html',
        'rel_pos_bias.jsonl',
        'validation.json',
    }
    assert load_config(out / 'config.yaml').seed == 3
    launch_record = json.loads((out / 'launches.json').read_text(encoding='utf-8'))[0]
    assert launch_record['timm'] and launch_record['world_size'] == 1 and 'commit' in launch_record
    rows = read_rows(out / 'summary.csv')
    assert len(rows) == 1 and rows[0]['images'] == '28'
    assert (out / 'curves.png').read_bytes().startswith(b'\x89PNG')
    last = torch.load(out / 'last.pt', weights_only=True)
    assert last['step'] == 3 and last['config']['seed'] == 3
    assert 'epoch   1/1' in done.stdout and 'img/s' in done.stdout and 'data wait' in done.stdout
    assert 'top-1   top-5' in done.stdout


def test_all_of_deits_augmentation_trains_and_resumes(tmp_path):
    root = digit_folder(tmp_path / 'data')
    keys = {**FOLDER_RUN, 'data_dir': str(root), 'in_chans': 3, 'mean': None, 'std': None, 'warmup_epochs': 0}
    keys |= {'aa': 'rand-m9-mstd0.5-inc1', 'aug_repeats': 3, 'reprob': 0.25}
    run_here(tmp_path / 'a', **keys)
    run_here(tmp_path / 'b', stop_at=2, **keys)
    run_here(tmp_path / 'b', resume='auto', **keys)
    a, b = (torch.load(tmp_path / name / 'last.pt', weights_only=True) for name in 'ab')
    assert all(torch.equal(a['state_dict'][k], b['state_dict'][k]) for k in a['state_dict'])


def test_validation_every_second_epoch(tmp_path):
    run_here(tmp_path, epochs=3, val_interval=2, global_batch=1024, mixup=0.0, cutmix=0.0)
    rows = read_rows(tmp_path / 'summary.csv')
    assert [bool(row['top1']) for row in rows] == [False, True, True]


def test_dry_run(tmp_path):
    file = config_file(tmp_path, global_batch=256, batch_size=32)
    done = launch('train.py', '--config', file, '--output', tmp_path / 'out', '--dry-run')
    for words in ('M parameters', '32 per device x 8', 'memory per device', 'images/s', 'days', '2 epochs x 5 steps'):
        assert words in done.stdout
    assert not (tmp_path / 'out').exists()


def test_dry_run_needs_no_data(capsys):
    dry_run(small_config(dataset='', train_images=1_281_167, num_classes=10), ONE)
    assert '2 epochs x 10009 steps' in capsys.readouterr().out
    with pytest.raises(InputError, match='give --data-dir, or the key train_images'):
        dry_run(small_config(dataset=''), ONE)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / 'last.pt'
    save_checkpoint({'format': 2, 'step': 1}, path)

    def full(descriptor):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError, match='No space left'):
        save_checkpoint({'format': 2, 'step': 2}, path)
    monkeypatch.undo()
    assert read_checkpoint(path) == {'format': 2, 'step': 1}
    assert [p.name for p in tmp_path.iterdir()] == ['last.pt']


def test_tensorboard(tmp_path):
    pytest.importorskip('tensorboard')
    run_here(tmp_path, epochs=1, warmup_epochs=0, tensorboard=True)
    assert list((tmp_path / 'tensorboard').iterdir())


def test_paper_number_stands_beside_ours():
    from nprf_vit.engine.tasks.classification import Classification

    results_table = Classification.results_table

    metrics = {'top1': 80.1, 'top5': 94.9, 'loss': 0.8, 'images': 50_000}
    table = results_table(small_config(model='nprf_deit_base', num_classes=1000), metrics)
    assert '80.9' in table and '94.8' in table and 'NPRF DeiT-base w/ RPE' in table
    assert 'paper' not in results_table(small_config(), metrics)
