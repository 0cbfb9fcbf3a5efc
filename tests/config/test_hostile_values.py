"""Configurations written to do harm: refused with one message, quickly, and nothing in them is executed."""

import contextlib
import itertools
import re

import pytest

from nprf_vit.config.schema import FIELDS
from nprf_vit.config.yaml_file import load_config, make_config
from nprf_vit.engine.build import build_training
from nprf_vit.errors import InputError
from tests.engine.running import ONE, small_config

LAUGHS = 'a: &a [x, x, x, x, x, x, x, x, x]\n' + ''.join(
    f'{chr(98 + i)}: &{chr(98 + i)} [{", ".join([f"*{chr(97 + i)}"] * 9)}]\n' for i in range(12)
)


def write(tmp_path, text):
    path = tmp_path / 'run.yaml'
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('model: !!python/object/apply:os.mkdir [made]\n', 'not valid YAML'),
        ('model: !!python/name:os.system\n', 'not valid YAML'),
        ('model: !!python/module:antigravity\n', 'not valid YAML'),
        (LAUGHS, ':2: not valid YAML .aliases are not read'),
        ('model: m\nmodel_kwargs: ' + '[' * 5000 + ']' * 5000, 'more than 8 levels'),
        ('model: m\nepochs: ' + '9' * 5000, 'run.yaml:2: epochs is not a YAML value'),
        ('model: m\nepochs: 2020-99-99', 'run.yaml:2: epochs is not a YAML value'),
        ('model: m\nepochs: 2020-09-09', 'run.yaml:2: epochs expects an integer'),
        ('model: m\nscale: [' + '1, ' * 1000 + ']', 'two numbers'),
        (b'model: \xff\xfe\x00', 'cannot read configuration file'),
        ('model: a\x00b', 'not valid YAML'),
        ('#' * (2**20 + 1), 'a configuration has at most 1048576'),
        ('? [1, 2]\n: 3\n', 'unknown key'),
        ('model: m\nlr: ' + '9' * 400, 'run.yaml:2: lr is not a YAML value .an integer of 400 characters'),
        ('model: m\nlr: 0x' + 'F' * 5000, 'run.yaml:2: lr is not a YAML value'),
        ('model: m\nepochs: 0b' + '1' * 20_000, 'run.yaml:2: epochs is not a YAML value'),
        ('model: m\nepochs: 1' + ':59' * 200_000, 'run.yaml:2: epochs is not a YAML value'),
        ('model: m\nlr: ' + '9' * 400 + '.0', 'run.yaml:2: lr expects a finite number, got inf'),
        ('model: m\nmodel_kwargs: {depth: 0x' + 'F' * 5000 + '}', 'run.yaml:2: model_kwargs is not a YAML value'),
        ("model: m\nepochs: !!int ''", 'run.yaml:2: epochs is not a YAML value'),
        ("model: m\nlr: !!float ''", 'run.yaml:2: lr is not a YAML value'),
        ('model: m\namp: !!bool x', 'run.yaml:2: amp is not a YAML value'),
        ('model: m\nseed: !!timestamp x', 'run.yaml:2: seed is not a YAML value'),
        ("model: m\n!!int '': 3", 'run.yaml:2: a key is not a YAML value'),
        ('model: m\n!!bool x: 3', 'run.yaml:2: a key is not a YAML value'),
        ('model: m\nmodel_kwargs: {[1]: 2}', 'not valid YAML .found unhashable key'),
        ('model: m\nmodel_kwargs: {1: 2}', 'model_kwargs expects names before its colons'),
        ('model: m\ndata_dir: "a\\0b"', 'run.yaml:2: data_dir .* no zero byte'),
        ('model: m\ndata_dir: ' + 'x' * 5000, 'run.yaml:2: data_dir .* at most 4096 characters'),
    ],
)
def test_hostile_text(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        load_config(write(tmp_path, text))
    assert len(str(error.value)) < 10_000
    assert {path.name for path in tmp_path.iterdir()} == {'run.yaml'}


@pytest.mark.parametrize('text', ['9' * 400, '0x' + 'F' * 5000, "!!int ''", '!!bool x', '!!timestamp x', '9' * 5000])
def test_hostile_overrides(text):
    with pytest.raises(InputError, match='--set lr=.*: not a YAML value') as error:
        make_config({'model': 'm'}, [f'lr={text}'])
    assert len(str(error.value)) < 300


@pytest.mark.parametrize('digits', [400, 6000])
def test_integers_of_any_size_from_a_checkpoint(digits):
    value = 10**digits
    for name in ('lr', 'epochs', 'model_kwargs', 'model', 'scale', 'amp_dtype'):
        with pytest.raises(InputError, match=name) as error:
            make_config({'model': 'm', name: value})
        assert len(str(error.value)) < 300


TAGS = ('int', 'float', 'bool', 'null', 'str', 'timestamp', 'binary', 'seq', 'map', 'set', 'omap', 'pairs', 'merge')
TAGS += ('value', 'python/tuple', 'nonsense')
VALUES = (
    "''",
    'x',
    '0x',
    '0b2',
    '1:99',
    '+',
    '-',
    '.',
    '_',
    '~',
    '[]',
    '{}',
    '[1, [2]]',
    '{a: 1}',
    '[{a: 1}]',
    '=',
    '<<',
)
VALUES += (
    '0x' + 'F' * 600,
    '1e999',
    '.nan',
    '2020-13-41',
    '2020-01-01T99:99:99Z',
    '"\\ud800"',
    '{<<: 1}',
    '{<<: {a: 1}}',
)


def test_no_tag_on_any_value_gets_another_error_out(tmp_path):
    tried = 0
    for tag, value, name in itertools.product(TAGS, VALUES, ('lr', 'epochs', 'amp', 'model_kwargs', 'scale', None)):
        line = f'{name}: !!{tag} {value}' if name else f'? !!{tag} {value}\n: 1'
        with contextlib.suppress(InputError):
            load_config(write(tmp_path, f'model: m\n{line}\n'))
        if name:
            with contextlib.suppress(InputError):
                make_config({'model': 'm'}, [f'{name}=!!{tag} {value}'])
        tried += 1
    assert tried == len(TAGS) * len(VALUES) * 6


NUMBERS = [name for name, item in FIELDS.items() if re.match(r'(int|float)\b', str(item.type).removeprefix("<class '"))]


@pytest.mark.parametrize('name', NUMBERS)
def test_no_key_takes_a_number_of_any_size(tmp_path, name):
    with pytest.raises(InputError, match=f'run.yaml:2: {name} .* is (above|none of)'):
        load_config(write(tmp_path, f'model: m\n{name}: {10**30}\n'))


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'depth': 10**9}, 'model_kwargs.depth 1000000000 is above the largest allowed value 1000'),
        ({'embed_dim': 10**12}, 'model_kwargs.embed_dim'),
        ({'init_values': float('inf')}, 'model_kwargs.init_values inf is above'),
        ({'something': [1, {'deep': 10**20}]}, 'model_kwargs.something.deep'),
        ({'checkpoint_path': '/tmp/x.pt'}, 'weights come by initial_checkpoint'),
        ({'pretrained_cfg': {'file': 'x'}}, 'weights come by initial_checkpoint'),
        ({'num_classes': 5}, 'has a key of its own: num_classes'),
    ],
)
def test_hostile_model_arguments(kwargs, message):
    with pytest.raises(InputError, match=message):
        small_config(model_kwargs=kwargs)


MODULE = 'open("imported", "w")\n'


@pytest.mark.parametrize(
    ('name', 'value', 'message'),
    [
        ('model', 'harm', 'unknown model harm'),
        ('model', './harm.py', 'unknown model'),
        ('dataset', 'harm', 'unknown dataset harm'),
        ('dataset', 'torch/harm', 'needs a data folder'),
        ('opt', 'harm', 'cannot build optimizer'),
        ('torchcompile', 'harm', 'torchcompile harm is none of'),
        ('torchcompile', 'harm.py', 'torchcompile harm.py is none of'),
        ('aa', 'harm', 'cannot build the transforms of aa harm'),
        ('aa', 'rand-n1000000000', 'more than 32 times'),
        ('initial_checkpoint', 'harm.py', 'cannot read checkpoint'),
        ('real_labels', 'harm.py', 'ReaL'),
    ],
)
def test_a_name_is_never_imported(tmp_path, monkeypatch, name, value, message):
    (tmp_path / 'harm.py').write_text(MODULE, encoding='utf-8')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=message):
        build_training(small_config(**{name: value}), ONE)
    assert not (tmp_path / 'imported').exists()
