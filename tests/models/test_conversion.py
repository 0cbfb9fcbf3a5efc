import re
import subprocess
import sys

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import ParallelScalingBlock

import nprf_vit
from nprf_vit.config.yaml_file import make_config
from nprf_vit.engine.model import build_model
from nprf_vit.layers import KERNELS, KernelAttention
from tests.engine.running import ROOT, launch, run_here

from .small import make

SMALL = {'embed_dim': 32, 'depth': 3, 'num_heads': 2, 'img_size': 64, 'num_classes': 5}


def vit(name='vit_base_patch16_224', **kwargs):
    return timm.create_model(name, **{**SMALL, **kwargs}).eval()


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('kwargs', [{}, {'rel_pos': 'layer'}, {'rel_pos': 'none'}, {'normalize': False}])
def test_twin_of_our_family(kernel, kwargs):
    source = make(kernel='softmax', **kwargs)
    image = torch.randn(2, 3, 64, 64)
    before = source(image)
    twin = nprf_vit.convert(source, kernel, feature_dim=8, seed=3)
    expected = make(kernel=kernel, seed=3, **kwargs)
    expected.load_state_dict(source.state_dict())
    torch.testing.assert_close(twin(image), expected(image))
    torch.testing.assert_close(source(image), before, msg='the argument is not changed')
    assert twin.state_dict().keys() == expected.state_dict().keys() and twin.kernel == kernel
    torch.testing.assert_close(nprf_vit.convert(twin, 'softmax')(image), before)


def test_more_features_come_closer_to_softmax():
    """The paper's conversion experiment in small: the error shrinks, and normalized models suffer less."""
    errors = {}
    for normalize in (True, False):
        source = make(kernel='softmax', normalize=normalize)
        for block in source.blocks:
            torch.nn.init.normal_(block.attn.qkv.weight, std=0.5)
        image = torch.randn(4, 3, 64, 64)
        with torch.no_grad():
            expected = source.forward_features(image)
            for m in (8, 1024):
                got = nprf_vit.convert(source, feature_dim=m).forward_features(image)
                errors[normalize, m] = (got - expected).norm() / expected.norm()
    assert errors[True, 1024] < 0.3 * errors[True, 8] and errors[True, 1024] < 0.05
    assert errors[True, 1024] < errors[False, 1024]


@pytest.mark.parametrize(
    'kwargs',
    [
        {},
        {'reg_tokens': 4},
        {'class_token': False, 'global_pool': 'avg'},
        {'qk_norm': True, 'scale_attn_norm': True, 'init_values': 1e-2},
        {'dynamic_img_size': True},
    ],
)
def test_any_timm_vit(kwargs):
    source = vit(**kwargs)
    image = torch.randn(2, 3, 64, 64)
    twin = nprf_vit.convert(source, 'prf', feature_dim=4096)
    assert all(isinstance(b.attn, KernelAttention) and not b.attn.normalize for b in twin.blocks)
    torch.testing.assert_close(twin(image), source(image), atol=0.02, rtol=0.1)
    torch.testing.assert_close(nprf_vit.convert(source, 'softmax')(image), source(image))
    theirs, ours = set(source.state_dict()), set(twin.state_dict())
    assert ours - theirs == {f'blocks.{i}.attn.w' for i in range(3)} and theirs <= ours
    twin.train()(image).sum().backward()
    assert all(p.grad is not None for p in twin.blocks.parameters())


def test_distilled_deit_and_dtype_and_mode():
    source = vit('deit_base_distilled_patch16_224').to(torch.bfloat16).train()
    twin = nprf_vit.convert(source)
    assert twin.training and twin.blocks[0].attn.training
    assert twin.blocks[0].attn.w.dtype == torch.float32
    assert twin.eval()(torch.randn(1, 3, 64, 64, dtype=torch.bfloat16)).isfinite().all()


def test_the_twin_is_a_function_of_the_seed():
    source = vit()
    image = torch.randn(1, 3, 64, 64)
    a, b, c = (nprf_vit.convert(source, seed=s) for s in (0, 0, 1))
    assert torch.equal(a(image), b(image)) and not torch.equal(a(image), c(image))
    assert not torch.equal(a.blocks[0].attn.w, a.blocks[1].attn.w)


def test_a_twin_saves_and_loads_like_any_model(tmp_path):
    source = make('softmax_deit_base')
    twin = nprf_vit.convert(source, 'prf', feature_dim=8, seed=5)
    torch.save(twin.state_dict(), tmp_path / 'twin.pth')
    loaded = make('prf_deit_base')
    loaded.load_state_dict(torch.load(tmp_path / 'twin.pth'))
    image = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded(image), twin(image))


@pytest.mark.parametrize(
    ('model', 'message'),
    [
        (lambda: timm.create_model('resnet18'), 'cannot convert a ResNet'),
        (lambda: vit(attn_drop_rate=0.1), 'cannot convert blocks.0.attn: attn_drop 0.1 needs attention weights'),
        (lambda: vit(attn_layer='diff'), 'cannot convert blocks.0: DiffAttention is not the attention'),
        (lambda: vit(block_fn=ParallelScalingBlock), 'cannot convert blocks.0: ParallelScalingBlock is not'),
        (lambda: timm.create_model('swin_tiny_patch4_window7_224'), 'cannot convert a SwinTransformer'),
    ],
)
def test_what_cannot_be_converted(model, message):
    with pytest.raises(ValueError, match=message):
        nprf_vit.convert(model())


def test_unknown_kernel():
    with pytest.raises(ValueError, match="unknown kernel 'relu'"):
        nprf_vit.convert(vit(), kernel='relu')


def run_command(*args):
    command = [sys.executable, '-W', 'error::RuntimeWarning', '-m', 'nprf_vit.convert_checkpoint', *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')
    kwargs = {'embed_dim': 32, 'depth': 1, 'num_heads': 2, 'patch_size': 2, 'kernel': 'softmax'}
    run_here(folder, epochs=1, warmup_epochs=0, model_kwargs=kwargs)
    return folder / 'best.pt'


def test_a_checkpoint_by_command(checkpoint, tmp_path):
    twin = tmp_path / 'twin.safetensors'
    done = run_command('--checkpoint', checkpoint, '--output', twin, '--feature-dim', 8, '--seed', 5)
    assert done.returncode == 0 and done.stderr == '', done.stderr
    said = done.stdout.splitlines()[-1].split()  # the command that measures it
    assert 'nprf_deit_tiny' in launch(*said[1:]).stdout
    content = torch.load(checkpoint, weights_only=True)
    source = build_model(make_config(content['config']), fresh=False)
    source.load_state_dict(content['state_dict_ema'])
    expected = nprf_vit.convert(source, 'prf', feature_dim=8, seed=5).state_dict()
    found = load_file(twin)
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)


def test_a_beit_checkpoint_by_command(tmp_path):
    """Trained by train.py under timm's name, converted, measured: with softmax the twin scores as the origin did."""
    kwargs = {'embed_dim': 32, 'depth': 1, 'num_heads': 2, 'patch_size': 2}
    run_here(tmp_path, model='beit_base_patch16_224', epochs=1, warmup_epochs=0, model_kwargs=kwargs)
    scores = []
    for kernel in ('softmax', 'prf'):
        twin = tmp_path / f'{kernel}.safetensors'
        done = run_command('--checkpoint', tmp_path / 'best.pt', '--output', twin, '--kernel', kernel)
        assert done.returncode == 0 and done.stderr == '', done.stderr
        said = launch(*done.stdout.splitlines()[-1].split()[1:]).stdout
        scores.append(re.search(r'top-1\D*([\d.]+)', said, re.I)[1])
    of_origin = launch('validate.py', '--config', tmp_path / 'config.yaml', '--checkpoint', tmp_path / 'best.pt').stdout
    assert re.search(r'top-1\D*([\d.]+)', of_origin, re.I)[1] == scores[0]
    assert 'blocks.0.attn.rel_pos_bias.token_to_prefix' in load_file(tmp_path / 'prf.safetensors')


def test_the_command_refuses_in_one_line(checkpoint, tmp_path):
    done = run_command()
    assert done.returncode == 2 and '--checkpoint' in done.stderr and 'Traceback' not in done.stderr
    for args, message in (
        (('--checkpoint', tmp_path / 'none.pt', '--output', tmp_path / 'a.safetensors'), 'no checkpoint file'),
        (('--checkpoint', checkpoint, '--output', tmp_path / 'a.pt'), 'expected a .safetensors file'),
        (('--checkpoint', checkpoint, '--output', tmp_path / 'a.safetensors', '--feature-dim', 0), 'feature_dim 0'),
    ):
        done = run_command(*args)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []
