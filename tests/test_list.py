"""python -m nprf_vit.list: names, and numbers that are those of real models."""

import re

import pytest
import timm
import torch

from nprf_vit import list as command
from nprf_vit.engine.dry_run.memory_count import CannotCount, _Live
from nprf_vit.engine.model_cost import count_model, own_size
from tests.pty_run import on_terminal


def listed(capsys, *words):
    assert command.main(list(words)) == 0
    lines = capsys.readouterr().out.splitlines()
    return [re.split(r'  +', line) for line in lines[: lines.index('')]]


def test_our_models_at_their_own_size(capsys):
    header, *rows = listed(capsys, '--filter', '*_tiny', 'prf_pixel*')
    assert header == ['model', 'image', 'parameters', 'GMACs', 'forward']
    tiny, pixel = rows
    model = timm.create_model('nprf_deit_tiny')
    assert tiny[:4] == [
        'nprf_deit_tiny',
        '224x224',
        f'{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M',
        '1.23',
    ]
    assert pixel[:3] == ['prf_pixel_imagenet32', '32x32', '21.01 M']


def test_every_model_of_ours_is_found_and_no_other():
    names = command.find_models(['*'], False)
    assert {'nprf_deit_base', 'softmax_deit_base', 'nprf_pixel_imagenet32'} <= set(names)
    assert 'deit_base_patch16_224' not in names
    assert 'deit_base_patch16_224' in command.find_models(['*deit_base*'], True)
    assert own_size('nprf_deit_base_384') == (384, 384)


def test_the_memory_of_a_forward_pass_is_that_of_its_tensors():
    size = (64, 96)
    cost = count_model('nprf_deit_tiny', size, batch_size=4, update=False)
    model = timm.create_model('nprf_deit_tiny', img_size=size).eval()
    images = torch.randn(4, 3, *size)
    with torch.no_grad(), _Live() as live:
        live.hold(model)
        model(images)
    assert cost.forward_bytes == pytest.approx(live.peak, rel=0.02) and cost.update_bytes is None
    assert cost.macs == count_model('nprf_deit_tiny', size, update=False).macs


def test_an_update_holds_weights_gradients_moments_and_activations():
    one, many = (count_model('nprf_deit_tiny', (64, 64), batch_size=batch) for batch in (1, 64))
    # weights, their gradients and two moments, four bytes each; then what is kept for the backward pass
    assert 16 * one.parameters < one.update_bytes < 18 * one.parameters < many.update_bytes


def test_what_cannot_be_counted_says_why(capsys):
    with pytest.raises(CannotCount):
        count_model('resnet18', (64, 64))
    _, tiny, other = listed(capsys, '--timm', '--filter', 'deit_tiny_patch16_224', 'resnet18', '--img-size', '64')
    assert tiny[:2] == ['deit_tiny_patch16_224', '64x64'] and other[1].startswith('not counted: TypeError')


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--filter', 'deit_bse'], '--filter deit_bse: no model of that name'),
        (['--img-size', '0'], '--img-size 0: expected one or two numbers from 1 to 16,384'),
        (['--img-size', '1', '2', '3'], '--img-size 1 2 3: expected'),
        (['--batch-size', '0'], '--batch-size 0: expected at least 1'),
        (['--timm'], '--timm lists what --filter names'),
    ],
)
def test_bad_arguments(words, message, capsys):
    assert command.main(words) == 2
    assert message in capsys.readouterr().err


def test_on_a_terminal_the_header_is_bold():
    code, shown = on_terminal(['-m', 'nprf_vit.list', '--filter', 'nprf_deit_tiny', '--img-size', '32'])
    assert code == 0 and '\x1b[1mmodel ' in shown and 'nprf_deit_tiny' in shown
