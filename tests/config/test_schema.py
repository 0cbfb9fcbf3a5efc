"""Typos, wrong types and wrong values are refused, with the line and what would be right."""

import pytest

from nprf_vit.config.schema import FIELDS, differences
from nprf_vit.config.yaml_file import dump_config, load_config, make_config
from nprf_vit.errors import InputError

GOOD = 'model: nprf_deit_tiny\nlr: 1e-3\n'


def write(tmp_path, text):
    path = tmp_path / 'run.yaml'
    path.write_text(text, encoding='utf-8')
    return path


@pytest.mark.parametrize('text', ['1e-5', '1.0e-5', '1E-5', '1e-05', '.00001', '0.00001', '10e-6'])
def test_floats_in_every_notation(tmp_path, text):
    assert load_config(write(tmp_path, f'model: m\nlr: {text}\n')).lr == 1e-5


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('epocs: 3', 'unknown key epocs; the nearest valid key is epochs'),
        ('drop_path_rate: 0.1', 'unknown key drop_path_rate; the nearest valid key is drop_path'),
        ('mixup_bloc: 8', 'the nearest valid key is mixup_block'),
        ('epochs: 3.5', 'epochs expects an integer, got 3.5'),
        ('epochs: "3"', "epochs expects an integer, got '3'"),
        ('weight_decay: high', "weight_decay expects a number, got 'high'"),
        ('weight_decay: .nan', 'weight_decay expects a finite number'),
        ('amp: 1', 'amp expects true or false, got 1'),
        ('aa: off', 'aa expects text, got False (quote it'),
        ('model_kwargs: 3', 'model_kwargs expects a mapping'),
        ('scale: [a, b]', "scale expects a number, got 'a'"),
        ('drop_path: 1.5', 'drop_path 1.5 is above the largest allowed value 1'),
        ('epochs: 0', 'epochs 0 is below the smallest allowed value 1'),
        ('amp_dtype: fp8', "amp_dtype 'fp8' is none of bfloat16, float16"),
        ('lr: 2e-3', 'the key lr appears twice, first at'),
        ('epochs: [', 'not valid YAML'),
    ],
)
def test_refused_with_the_line(tmp_path, line, message):
    path = write(tmp_path, GOOD + line + '\n')
    with pytest.raises(InputError) as error:
        load_config(path)
    assert message in str(error.value)
    assert f'{path}:3' in str(error.value) or 'not valid YAML' in message


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('mixup: 0.8\nmixup_block: 7', 'mixup_block 7 must be even'),
        ('scale: [1, 0.5]', 'two numbers [smallest, largest]'),
        ('mean: [0.5]', 'mean has 1 entries: expected in_chans = 3'),
        ('opt_betas: [0.9]', 'opt_betas [0.9] must be two numbers'),
        ('eval_metric: ema_top1', 'needs model_ema: true'),
        ('epochs: 5\nwarmup_epochs: 5', 'warmup_epochs 5 must be below epochs 5'),
    ],
)
def test_values_that_do_not_fit_together(tmp_path, line, message):
    with pytest.raises(InputError, match=message.replace('[', r'\[').replace(']', r'\]')):
        load_config(write(tmp_path, GOOD + line + '\n'))


def test_overrides(tmp_path):
    path = write(tmp_path, GOOD + 'model_kwargs: {depth: 4, num_heads: 2}\n')
    config = load_config(path, ['lr=2e-4', 'model_kwargs.depth=6', 'scale=[0.5, 1]', 'aa=null'])
    assert (config.lr, config.model_kwargs, config.scale) == (2e-4, {'depth': 6, 'num_heads': 2}, (0.5, 1.0))
    for item in ('lr', 'lrr=1', 'lr=fast', 'lr.x=1', 'lr=['):
        with pytest.raises(InputError, match='--set'):
            load_config(path, [item])


def test_missing_file_and_missing_model(tmp_path):
    with pytest.raises(InputError, match='no configuration file'):
        load_config(tmp_path / 'none.yaml')
    with pytest.raises(InputError, match='the key model is missing'):
        load_config(write(tmp_path, 'lr: 1e-3\n'))
    with pytest.raises(InputError, match='flat mapping'):
        load_config(write(tmp_path, '- model\n'))


def test_yaml_is_loaded_safely(tmp_path):
    target = tmp_path / 'made'
    path = write(tmp_path, f'model: !!python/object/apply:os.mkdir ["{target}"]\n')
    with pytest.raises(InputError, match='not valid YAML'):
        load_config(path)
    assert not target.exists()


def test_resolved_configuration_reads_back_equal(tmp_path):
    config = make_config({'model': 'm', 'lr': 1e-5, 'opt_eps': 1e-8, 'mean': [0.1, 0.2, 0.3], 'model_kwargs': {'a': 1}})
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_only_placement_may_differ_between_a_run_and_its_continuation():
    a = make_config({'model': 'm', 'lr': 1e-3}).to_dict()
    assert differences(a, {**a, 'workers': 9, 'batch_size': 3, 'data_dir': 'x'}) == []
    assert differences(a, {**a, 'lr': 1e-4}) == ['lr: 0.001 there, 0.0001 here']
    free = {name for name, item in FIELDS.items() if item.metadata['free']}
    assert not free & {'seed', 'global_batch', 'lr', 'aa', 'mixup_block', 'epochs', 'amp_dtype'}
