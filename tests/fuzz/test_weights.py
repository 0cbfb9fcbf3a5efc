"""Weights of other people: safetensors and state dicts with tensors that no model has. One line each, no gigabytes.

python -m pytest tests/fuzz/test_weights.py --budget 2000
"""

import random
import resource
import time

import pytest
import torch
from safetensors.torch import save_file

from nprf_vit.engine.model import build_model
from nprf_vit.engine.validate import load_models
from nprf_vit.errors import InputError

from ..engine.running import SMALL, small_config
from .budget import cases

SECONDS, MEGABYTES = 20, 600  # of one case on a busy machine; of all of them

SHAPES = {
    'scalar': lambda shape, rng: (),
    'empty': lambda shape, rng: rng.choice(((0,), (0, 2**40), (3, 0), (1, 0, 4), (0, 0, 0, 0))),
    'one dimension': lambda shape, rng: (rng.choice((1, 7, 4096)),),
    'one more dimension': lambda shape, rng: (*shape, rng.choice((1, 2))),
    'one less': lambda shape, rng: tuple(shape)[1:],
    'longer': lambda shape, rng: tuple(n + rng.choice((0, 1, 7)) for n in shape),
    'much longer': lambda shape, rng: (*tuple(shape)[:1], 4099),
    'transposed': lambda shape, rng: tuple(shape)[::-1],
    'eight dimensions': lambda shape, rng: (1, 2, 1, 2, 1, 2, 1, 2),
    'huge kernel': lambda shape, rng: (1, 1, *rng.choice(((1, 4099), (700, 700), (65, 64)))),
}
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool)
TYPES += (torch.complex64, torch.float8_e4m3fn)
NAMES = (
    'cls_token',
    'dist_token',
    'reg_token',
    'pos_embed',
    'rel_pos_bias.table',
    'rel_pos_bias.far',
    'head_dist.weight',
)
NAMES += 'pre_logits.fc.weight', 'fc_norm.weight', 'blocks.0.gamma_1', 'blocks.0.attn.w', 'patch_embed.proj.weight', ''


def change(weights, rng):
    """One tensor of another shape, of another type, gone, or added; returns what was done."""
    name = rng.choice((rng.choice(list(weights)), rng.choice(NAMES)))
    old = weights.get(name, torch.zeros(1, 16, 32))
    how = rng.choice((*SHAPES, 'type', 'gone', 'as it is'))
    if how == 'gone':
        weights.pop(name, None)
        return f'without {name}'
    shape = SHAPES[how](old.shape, rng) if how in SHAPES else old.shape
    dtype = rng.choice(TYPES) if how == 'type' or rng.random() < 0.2 else torch.float32
    if name == 'patch_embed.proj.weight' and how == 'huge kernel' and old.ndim == 4:
        shape = (*old.shape[:2], *shape[-2:])
    weights[name] = torch.zeros(shape, dtype=dtype)
    return f'{name} {how} {tuple(shape)} {dtype}'


def configs():
    """A model of ours with a bias, two with a continued bias, one with an embedding, and one of timm."""
    kwargs = SMALL['model_kwargs']
    plain = {'img_size': 8, 'model_kwargs': kwargs}
    timms = {name: kwargs[name] for name in ('embed_dim', 'depth', 'num_heads', 'patch_size')}
    return {
        'bias': small_config(**plain),
        'window': small_config(**{**plain, 'model_kwargs': {**kwargs, 'rel_pos_extend': 'extend'}}),
        'cells': small_config(**{**plain, 'model_kwargs': {**kwargs, 'rel_pos_extend': 'cells'}}),
        'embedding': small_config(**plain, model='prf_deit_base'),
        'timm': small_config(img_size=8, model='deit_tiny_patch16_224', model_kwargs=timms),
    }


def enter(path, config):
    for way in (
        lambda: load_models(build_model(config, fresh=False, checkpoint=str(path)), str(path), config),
        lambda: build_model(small_config(**{**config.to_dict(), 'initial_checkpoint': str(path)})),
    ):
        try:
            way()
        except InputError as error:
            assert '\n' not in str(error).strip() and len(str(error)) < 2000, error


def try_all(tmp_path, writes, number, known):
    rng = random.Random(number)
    kind = rng.choice(list(known))
    weights = dict(known[kind][1])
    what = '; '.join([kind, *(change(weights, rng) for _ in range(rng.choice((1, 1, 2, 4))))])
    for suffix, write in writes.items():
        path = tmp_path / f'weights{suffix}'
        write(weights, path)
        begin = time.monotonic()
        try:
            enter(path, known[kind][0])
        except Exception as error:
            raise AssertionError(f'case {number}, {suffix}: {what}') from error
        assert time.monotonic() - begin < SECONDS, f'case {number}, {suffix}: {what}'


def test_other_weights_are_told_in_one_line(tmp_path):
    known = {name: (config, build_model(config).state_dict()) for name, config in configs().items()}
    writes = {'.safetensors': save_file, '.pth': lambda weights, path: torch.save({'model': weights}, path)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(cases(20)):
        try_all(tmp_path, writes, number, known)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES, f'{grown:.0f} MB'


@pytest.mark.parametrize('kind', ['bias', 'timm'])
def test_a_patch_kernel_that_nobody_resamples(kind, tmp_path):
    """A quarter of a million pixels: resampling would take the square of it."""
    config = configs()[kind]
    weights = build_model(config).state_dict()
    name = 'patch_embed.proj.weight'
    save_file({**weights, name: torch.zeros(*weights[name].shape[:2], 512, 512)}, tmp_path / 'w.safetensors')
    with pytest.raises(InputError, match='patches of more than 4096 pixels are not resampled'):
        build_model(small_config(**{**config.to_dict(), 'initial_checkpoint': str(tmp_path / 'w.safetensors')}))


@pytest.mark.parametrize('dtype', [torch.int8, torch.bool, torch.complex64])
def test_numbers_of_another_kind_are_no_weights(dtype, tmp_path):
    config = configs()['bias']
    weights = build_model(config).state_dict()
    weights['blocks.0.mlp.fc1.weight'] = weights['blocks.0.mlp.fc1.weight'].to(dtype)
    save_file(weights, tmp_path / 'w.safetensors')
    with pytest.raises(InputError, match=r'blocks\.0\.mlp\.fc1\.weight is of torch'):
        build_model(small_config(**{**config.to_dict(), 'initial_checkpoint': str(tmp_path / 'w.safetensors')}))
    with pytest.raises(InputError, match=r'blocks\.0\.mlp\.fc1\.weight is of torch'):
        load_models(build_model(config), str(tmp_path / 'w.safetensors'), config)
