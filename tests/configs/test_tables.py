"""Every value of every ImageNet configuration, against the list of decisions."""

from pathlib import Path

import pytest
import torch

from nprf_vit.config.yaml_file import load_config, override
from nprf_vit.data.batch_plan import plan_batches
from nprf_vit.engine.model import build_model
from nprf_vit.engine.output.paper_results import PAPER

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
IMAGENET = CONFIGS / 'imagenet1k'

# what all rows share: the paper's appendix and DeiT's augmentation
SHARED = {
    'task': 'classification',
    'dataset': '',
    'train_images': 1_281_167,
    'val_images': 50_000,
    'num_classes': 1000,
    'img_size': 224,
    'in_chans': 3,
    'opt': 'adamw',
    'opt_betas': (0.9, 0.999),
    'opt_eps': 1e-8,
    'global_batch': 1024,
    'weight_decay': 0.05,
    'sched': 'cosine',
    'smoothing': 0.1,
    'aa': 'rand-m9-mstd0.5-inc1',
    'color_jitter': 0.3,
    'train_interpolation': 'bicubic',
    'interpolation': 'bicubic',
    'aug_repeats': 3,
    'reprob': 0.25,
    'remode': 'pixel',
    'recount': 1,
    'mixup': 0.8,
    'cutmix': 1.0,
    'mixup_prob': 1.0,
    'mixup_switch_prob': 0.5,
    'mixup_mode': 'batch',
    'scale': (0.08, 1.0),
    'ratio': (3 / 4, 4 / 3),
    'hflip': 0.5,
    'vflip': 0.0,
    'drop': 0.0,
    'drop_path': 0.1,
    'min_lr': 1e-5,
    'model_ema': True,
    'model_ema_decay': 0.99996,
    'crop_pct': 0.875,
    'crop_mode': 'center',
    'clip_grad': None,
    'layer_decay': None,
    'no_aug': False,
    'mixup_off_epoch': 0,
    'pretrained': False,
    'model_kwargs': {},
    'mean': None,
    'std': None,
}
SCRATCH = {'epochs': 450, 'warmup_epochs': 20, 'lr': 1e-3, 'warmup_lr': 1e-5, 'initial_checkpoint': None}
ROWS = {
    'nprf_deit_base': {'model': 'nprf_deit_base', **SCRATCH},
    'nprf_deit_base_norpe': {'model': 'nprf_deit_base_norpe', **SCRATCH},
    'nprf_deit_base_literal_lr': {'model': 'nprf_deit_base', **SCRATCH, 'lr': 1e-5, 'warmup_lr': 1e-6},
    'prf_deit_base': {
        'model': 'prf_deit_base',
        'epochs': 100,
        'warmup_epochs': 6,
        'lr': 1e-5,
        'warmup_lr': 1e-6,
        'initial_checkpoint': 'deit_base_patch16_224-b5f2ef4d.pth',
    },
    'softmax_deit_base': {'model': 'softmax_deit_base', **SCRATCH, 'epochs': 300, 'warmup_epochs': 5},
}


# not of the paper: DeiT's settings for higher resolutions
FINE_TUNED = {
    'nprf_deit_base_384': {
        'model': 'nprf_deit_base_384',
        'img_size': 384,
        'global_batch': 512,
        'weight_decay': 1e-8,
        'epochs': 30,
        'warmup_epochs': 5,
        'lr': 5e-6,
        'min_lr': 5e-6,
        'warmup_lr': 1e-6,
        'initial_checkpoint': 'output/nprf_deit_base/best.pt',
    }
}


def test_there_is_one_file_per_row():
    assert {path.stem for path in IMAGENET.glob('*.yaml')} == {*ROWS, *FINE_TUNED}


@pytest.mark.parametrize('name', [*ROWS, *FINE_TUNED])
def test_values(name):
    config = load_config(IMAGENET / f'{name}.yaml')
    expected = {**SHARED, **(ROWS | FINE_TUNED)[name]}
    assert {key: getattr(config, key) for key in expected} == expected


def test_rows_differ_in_model_and_schedule_only():
    """So that what is shown of one row's data pipeline is shown of all."""
    first, *others = (load_config(IMAGENET / f'{name}.yaml').to_dict() for name in ROWS)
    keys = {key for other in others for key in first if other[key] != first[key]}
    assert keys == {'model', 'initial_checkpoint', 'lr', 'epochs', 'warmup_epochs', 'warmup_lr'}


@pytest.mark.parametrize('name', [*ROWS, *FINE_TUNED])
def test_header_has_row_command_and_what_was_measured(name):
    text = (IMAGENET / f'{name}.yaml').read_text(encoding='utf-8')
    header = text.split('\nmodel:')[0]
    if name in ROWS:
        top1, top5, _ = PAPER[ROWS[name]['model']]
        assert f'{top1} top-1 / {top5} top-5' in header
    else:
        assert 'No row of the paper' in header and 'Measured: not run' in header
    assert f'train.py --config configs/imagenet1k/{name}.yaml --data-dir IMAGENET' in header
    assert 'Measured: ' in header


@pytest.mark.parametrize('path', sorted(CONFIGS.rglob('*.yaml')), ids=lambda p: p.stem)
def test_every_file_loads_and_none_relies_on_defaults_for_the_rate(path):
    config = load_config(path)
    assert config.lr is not None and config.lr > 0


@pytest.mark.parametrize('world', [1, 2, 4, 8, 16])
def test_batch_of_the_fine_tune_fits_every_usual_number_of_gpus(world):
    config = load_config(IMAGENET / 'nprf_deit_base_384.yaml')
    plan = plan_batches(config.global_batch, world, config.batch_size, config.mixup_block)
    assert plan.micro * plan.accumulation * world == 512
    assert plan.micro == min(64, 512 // world)


def test_the_fine_tune_takes_the_weights_of_224_pixels(tmp_path, caplog):
    """The very models of the two files, but for their width and depth."""
    small = {'embed_dim': 32, 'depth': 1, 'num_heads': 2}
    first, second = (load_config(IMAGENET / f'{name}.yaml') for name in ('nprf_deit_base', 'nprf_deit_base_384'))
    torch.save(build_model(override(first, model_kwargs=small)).state_dict(), tmp_path / 'best.pt')
    changes = {'model_kwargs': small, 'initial_checkpoint': str(tmp_path / 'best.pt')}
    model = build_model(override(second, **changes))
    assert model.rel_pos_bias.grid_size == (24, 24)
    assert 'resized rel_pos_bias.table ((27, 27) to (47, 47))' in caplog.text


@pytest.mark.parametrize('world', [1, 2, 4, 8, 16, 32])
def test_batch_fits_every_usual_number_of_gpus(world):
    config = load_config(IMAGENET / 'nprf_deit_base.yaml')
    plan = plan_batches(config.global_batch, world, config.batch_size, config.mixup_block)
    assert plan.micro * plan.accumulation * world == 1024
    assert plan.micro == min(128, 1024 // world)
