"""Every value of the ImageNet32 configurations, against the list of decisions."""

from pathlib import Path

import pytest
import timm
import torch

from nprf_vit.config.yaml_file import load_config
from nprf_vit.data.batch_plan import plan_batches
from nprf_vit.engine.lr_schedule import build_schedule
from nprf_vit.engine.optimizer import build_optimizer
from nprf_vit.engine.output.paper_results import PAPER_BITS

CONFIGS = Path(__file__).resolve().parents[2] / 'configs' / 'imagenet32'
NAMES = ('nprf_pixel_imagenet32', 'prf_pixel_imagenet32', 'softmax_pixel_imagenet32')
EXPECTED = {
    'task': 'pixel',
    'dataset': 'imagenet32_chrabaszcz',
    'model_kwargs': {},
    'drop': 0.1,
    'global_batch': 64,
    'opt': 'adamw',
    'opt_betas': (0.9, 0.98),
    'opt_eps': 1e-6,
    'lr': 5e-4,
    'weight_decay': 0.01,
    'sched': 'inverse_sqrt',
    'eval_metric': 'bpd',
    'clip_grad': None,
    'train_images': None,  # those of the version
    'val_images': None,
}


def test_there_is_one_file_per_model():
    assert {path.stem for path in CONFIGS.glob('*.yaml')} == set(NAMES)


@pytest.mark.parametrize('name', NAMES)
def test_values(name):
    config = load_config(CONFIGS / f'{name}.yaml')
    assert {key: getattr(config, key) for key in EXPECTED} == EXPECTED
    assert config.model == name
    assert config.epochs * config.epoch_steps == 150_000 and config.warmup_epochs * config.epoch_steps == 6_000


@pytest.mark.parametrize('name', NAMES)
def test_header(name):
    header = (CONFIGS / f'{name}.yaml').read_text(encoding='utf-8').split('\ntask:')[0]
    assert f'train.py --config configs/imagenet32/{name}.yaml --data-dir IMAGENET32' in header
    assert 'Measured: ' in header and 'imagenet32_vandenoord' in header and 'not comparable' in header
    if name in PAPER_BITS:
        assert f'{PAPER_BITS[name]} bits/dim in the paper' in header


def test_rate_and_decay():
    config = load_config(CONFIGS / 'nprf_pixel_imagenet32.yaml')
    with torch.device('meta'):
        model = timm.create_model(config.model, depth=1)
    optimizer = build_optimizer(config, model)
    schedule = build_schedule(config, optimizer, config.epoch_steps)
    rates = []
    for step in (0, 3_000, 6_000, 24_000, 150_000):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]['lr'])
    assert rates == pytest.approx([1e-7, 2.5e-4, 5e-4, 2.5e-4, 1e-4], rel=1e-3)
    plain = {id(p) for g in optimizer.param_groups if g['weight_decay'] == 0 for p in g['params']}
    assert id(model.rel_pos_bias.table) in plain and id(model.head.weight) not in plain


@pytest.mark.parametrize('world', [1, 2, 4, 8, 16, 32, 64])
def test_batch_fits_every_usual_number_of_gpus(world):
    config = load_config(CONFIGS / 'nprf_pixel_imagenet32.yaml')
    plan = plan_batches(config.global_batch, world, config.batch_size)
    assert plan.micro * plan.accumulation * world == 64
