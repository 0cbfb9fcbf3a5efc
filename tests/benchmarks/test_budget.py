"""The estimate of GPU-days counts what it says."""

import csv

import pytest

from benchmarks import budget
from benchmarks.zoo import count
from nprf_vit.config.yaml_file import load_config


def test_quick_run_writes_a_row(tmp_path, capsys):
    budget.main(['--quick', '--output', str(tmp_path)])
    (row,) = csv.DictReader((tmp_path / 'quick_budget.csv').open())
    assert row['config'] == 'configs/imagenet1k/nprf_deit_base.yaml'
    assert float(row['gflop_per_image']) == pytest.approx(2 * count('nprf_deit_base')[1], abs=0.1)
    assert float(row['V100_days']) > float(row['A100_days']) > float(row['H100_days']) > 0
    assert float(row['A100_days_fused']) < float(row['A100_days'])
    assert 'budget.csv' in capsys.readouterr().out


def test_images_of_a_schedule():
    by_epoch = load_config(budget.ROOT / 'configs/imagenet1k/nprf_deit_base.yaml')
    assert budget.images(by_epoch) == 450 * 1251 * 1024
    by_step = load_config(budget.ROOT / 'configs/imagenet32/nprf_pixel_imagenet32.yaml')
    assert budget.images(by_step) == 150_000 * 64


def test_the_attention_op_of_a_causal_model_is_counted_in_full():
    row = budget.estimate(budget.ROOT / 'configs/imagenet32/nprf_pixel_imagenet32.yaml')
    expected = 6 * 8 * 3072**2 * (32 + 64 + 1)  # layers, heads; a multiply-add is two operations, causal is half
    assert float(row['of_it_attention_op']) == pytest.approx(expected / 1e9, rel=1e-2)


def test_the_papers_config_by_the_fused_kernels_is_near_softmax():
    """An estimate: at most 1.1 times the days of softmax attention."""
    kernel, softmax = (
        budget.estimate(budget.ROOT / f'configs/imagenet1k/{name}.yaml')
        for name in ('nprf_deit_base', 'softmax_deit_base')
    )
    per_image = [float(row['A100_days_fused']) / row['images'] for row in (kernel, softmax)]
    assert per_image[0] <= 1.1 * per_image[1]
