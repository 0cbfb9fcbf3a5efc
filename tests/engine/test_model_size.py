"""Checkpoints whose configuration describes a model that no memory holds: refused by size before it is built."""

import resource

import pytest
import timm
import torch

from nprf_vit.config.yaml_file import make_config
from nprf_vit.convert_checkpoint import convert_checkpoint
from nprf_vit.engine.checkpoint.file import read_checkpoint, save_checkpoint
from nprf_vit.engine.model import build_model
from nprf_vit.engine.model_size import ALLOWANCE, TooLarge, bounded, build_within
from nprf_vit.engine.validate import validate
from nprf_vit.errors import InputError
from nprf_vit.sample import load_model

from .running import ONE, SMALL, run_here, small_config

HUGE = [
    {'embed_dim': 65536, 'depth': 1000, 'num_heads': 1024},
    {'embed_dim': 8192, 'depth': 1, 'num_heads': 1},
    {'embed_dim': 32, 'depth': 1000, 'num_heads': 1, 'feature_dim': 65536},
    {'embed_dim': 32, 'depth': 2, 'num_heads': 2, 'mlp_ratio': 256, 'patch_size': 4096},
]
PIXEL = {'model': 'nprf_pixel_imagenet32', 'task': 'pixel', 'img_size': 4, 'in_chans': 1}
PIXEL |= {'eval_metric': 'bpd', 'dataset': 'digits'}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    run_here(folder, stop_at=2)
    return folder / 'last.pt'


@pytest.mark.parametrize('kwargs', HUGE)
def test_every_entrance_refuses_before_building(trained, tmp_path, kwargs):
    content = read_checkpoint(trained)
    pixels = make_config({**PIXEL, 'model_kwargs': kwargs}).to_dict()
    wrong = {'classes': {**content['config'], 'model_kwargs': kwargs}, 'pixels': pixels}
    for name, config in wrong.items():
        save_checkpoint({**content, 'config': config}, tmp_path / f'{name}.pt')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for way in (
        lambda: convert_checkpoint(str(tmp_path / 'classes.pt'), 'prf', 8, 0),
        lambda: load_model(str(tmp_path / 'pixels.pt')),
        lambda: validate(small_config(model_kwargs=kwargs), ONE, str(trained)),
    ):
        with pytest.raises(InputError, match='far too small for the weights of|cannot build model'):
            way()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KB


def test_a_model_that_fits_is_the_same_with_the_bound(trained):
    plain, checked = build_model(small_config()), build_model(small_config(), fresh=False, checkpoint=str(trained))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, checked.state_dict()[name]), name


def test_the_bound_counts_parameters_buffers_and_their_number():
    model = timm.create_model('nprf_deit_tiny', **SMALL['model_kwargs'], img_size=8)
    least = sum(max(value.numel(), 256) for value in model.state_dict().values())

    def build():
        return timm.create_model('nprf_deit_tiny', **SMALL['model_kwargs'], img_size=8)

    assert build_within(least + 256, build).state_dict().keys() == model.state_dict().keys()
    with pytest.raises(TooLarge):
        build_within(least - 1, build)
    with pytest.raises(TooLarge), bounded(10 * 256):
        for _ in range(11):
            torch.nn.BatchNorm1d(1, affine=False)
    torch.nn.Linear(ALLOWANCE // 2**10, 2**11)  # outside nothing is counted


def test_a_model_that_computes_while_it_is_built_is_still_bounded():
    def build():
        torch.ones(1).item()  # fails without memory
        return torch.nn.Linear(100, 100)

    assert build_within(20_000, build).weight.shape == (100, 100)
    with pytest.raises(TooLarge):
        build_within(9_000, build)
