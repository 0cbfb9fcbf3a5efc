"""Rectangles, short runs, other people's models, and keys that were nearly right."""

import logging
import os

import pytest
import torch

from nprf_vit.config.yaml_file import load_config, make_config
from nprf_vit.data.transforms import model_input_size
from nprf_vit.engine.model import build_model, load_exact
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.errors import InputError
from tests.engine.running import ROOT, assert_same_end, config_file, launch, run_here, small_config

GOOD = {'model': 'nprf_deit_tiny', 'lr': 1e-3}


def test_a_rectangle_from_a_file_and_from_the_command_line(tmp_path):
    file = config_file(tmp_path)
    for text in ('img_size=[8, 12]', 'img_size=[8,12]'):
        config = load_config(file, [text])
        assert config.img_size == (8, 12) and config.to_dict()['img_size'] == [8, 12]
        assert model_input_size(config, build_model(config)) == (1, 8, 12)
    assert load_config(file, ['img_size=[8, 8]']).img_size == 8
    for text, message in (('[8]', 'one side or'), ('[8, 0]', 'below'), ('[8, 8.5]', 'an integer'), ('a', 'an integer')):
        with pytest.raises(InputError, match=message):
            load_config(file, [f'img_size={text}'])


def test_a_rectangle_trains_resumes_and_validates(tmp_path):
    file = config_file(tmp_path, epochs=2, warmup_epochs=0)
    run = ('--config', file, '--output', tmp_path / 'out')
    launch('train.py', *run, '--set', 'img_size=[8, 12]', 'epochs=1')
    launch('train.py', *run, '--set', 'img_size=[8, 12]', 'epochs=1', '--resume', 'auto')
    launch('train.py', *run, '--set', 'img_size=[8, 12]', 'epochs=1', '--dry-run')
    last = torch.load(tmp_path / 'out' / 'last.pt', weights_only=True)
    assert last['config']['img_size'] == [8, 12] and last['state_dict']['rel_pos_bias.table'].shape == (2, 7, 11)
    check = ('--config', tmp_path / 'out' / 'config.yaml', '--checkpoint', tmp_path / 'out' / 'last.pt')
    [row] = read_rows(tmp_path / 'out' / 'summary.csv')
    assert f'{float(row["loss"]):.4f}' in launch('validate.py', *check).stdout.splitlines()[1]
    config = load_config(tmp_path / 'out' / 'config.yaml')
    model = build_model(config, fresh=False).eval()
    load_exact(model, last['state_dict'], 'last.pt')
    image = torch.randn(1, *model_input_size(config, model))
    torch.testing.assert_close(torch.export.export(model, (image,)).module()(image), model(image))


def test_a_rectangle_continues_to_the_same_end(tmp_path):
    run_here(tmp_path / 'a', img_size=[12, 8])
    run_here(tmp_path / 'b', stop_at=14, img_size=[12, 8])
    run_here(tmp_path / 'b', resume='auto', img_size=[12, 8])
    assert_same_end(tmp_path / 'a', tmp_path / 'b')


def test_fewer_epochs_shorten_the_warm_up(tmp_path, caplog):
    file = config_file(tmp_path, epochs=450, warmup_epochs=20)
    with caplog.at_level(logging.WARNING):
        assert load_config(file, ['epochs=1']).warmup_epochs == 0
        assert 'warm-up shortened from 20 to 0 epochs' in caplog.text
        assert load_config(file, ['epochs=10']).warmup_epochs == 1
        caplog.clear()
        assert load_config(file, ['epochs=30']).warmup_epochs == 20 and not caplog.text
    with pytest.raises(InputError, match='warmup_epochs 5 must be below epochs 5: --set warmup_epochs=4 or less'):
        load_config(file, ['epochs=5', 'warmup_epochs=5'])
    with pytest.raises(InputError, match='--set epochs=2 or more'):
        load_config(file, ['epochs=1', 'sched=inverse_sqrt'])


@pytest.mark.parametrize('name', [str(p.relative_to(ROOT)) for p in sorted((ROOT / 'configs').rglob('*.yaml'))])
def test_a_short_run_of_every_shipped_config(name):
    assert load_config(ROOT / name, ['epochs=2']).warmup_epochs <= 1


def test_a_convolutional_network_needs_no_img_size():
    config = make_config({'model': 'resnet18', 'lr': 1e-3, 'img_size': 64, 'num_classes': 10})
    model = build_model(config)
    assert model(torch.zeros(1, *model_input_size(config, model))).shape == (1, 10)
    again = build_model(config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize(
    ('keys', 'message'),
    [
        ({'model': 'resnet18', 'model_kwargs': {'depth': 4}}, "argument 'depth'$"),
        ({'model': 'vgg11', 'drop_path': 0.1}, 'vgg11 has none, leave the key drop_path at 0'),
        ({'model_kwargs': {'patch_size': 2, 'featuredim': 4}}, r'did you mean feature_dim\?'),
    ],
)
def test_arguments_that_a_model_does_not_take(keys, message):
    with pytest.raises(InputError, match=message):
        build_model(small_config(**keys))


@pytest.mark.parametrize(
    ('item', 'message'),
    [
        ('epocs=1', r'nearest valid key is epochs \(--set epochs=1\)'),
        ('embed_dim=64', 'it is an argument of the model: --set model_kwargs.embed_dim=64'),
        ('mixup_bloc=8', 'mixup_block .* or '),
    ],
)
def test_a_misspelt_override_comes_back_as_it_should_be(item, message):
    with pytest.raises(InputError, match=f'--set {item}: unknown key .*{message}'):
        make_config(GOOD, [item])


def test_the_warm_up_is_told_once_under_torchrun(monkeypatch, caplog):
    monkeypatch.setitem(os.environ, 'RANK', '1')
    make_config({**GOOD, 'epochs': 9, 'warmup_epochs': 3}, ['epochs=2'])
    assert not caplog.text
