"""Settings of the language examples: what is refused, in one line, and which weights decay."""

import pytest

from examples.language import language_model, masked_language_model, translation
from examples.language.settings import parse
from nprf_vit.engine.optimizer import build_optimizer
from nprf_vit.errors import InputError

from ..engine.running import ONE
from .running import options, settings_of, wikitext

EXAMPLES = {'language': language_model, 'translation': translation, 'masked': masked_language_model}


@pytest.mark.parametrize(
    ('example', 'changes', 'said'),
    [
        ('language', {'dim': 15}, 'dim 15 cannot be divided into num_heads 2'),
        ('language', {'num_heads': 0}, 'num_heads 0: expected at least 1'),
        ('language', {'dropout': 1.5}, 'dropout 1.5: expected 0 … 0.99'),
        ('language', {'lr': float('nan')}, 'lr nan: expected at least 0'),
        ('language', {'length': 0}, 'length 0: expected at least 1'),
        ('language', {'context': 128}, 'context 128: expected 0 … 127'),
        ('language', {'cutoffs': 'a,b'}, 'cutoffs a,b: expected numbers with commas between'),
        ('language', {'cutoffs': '12,6'}, 'cutoffs 12,6: expected ranks that increase'),
        ('language', {'temperature': 0.0}, 'temperature 0.0: expected at least 0.01'),
        ('language', {'eval_interval': -1}, 'eval_interval -1: expected at least 0'),
        ('language', {'variant': 'rnn'}, 'variant rnn: expected one of nprf_bias, '),
        ('translation', {'beam': 0}, 'beam 0: expected at least 1'),
        ('translation', {'target': 'de'}, 'source and target are both de'),
        ('masked', {'length': 2}, 'length 2: expected at least 3'),
        ('masked', {'masked': 2.0}, 'masked 2.0: expected 0.01 … 1'),
        ('masked', {'learning_rates': '1e-5;2e-5'}, 'learning_rates 1e-5;2e-5: expected numbers with commas'),
        ('masked', {'task': 'WNLI'}, 'task WNLI: expected one of all, CoLA'),
    ],
)
def test_values_that_cannot_be_are_refused(example, changes, said, tmp_path):
    with pytest.raises(InputError, match=said) as error:
        settings_of(EXAMPLES[example], tmp_path, tmp_path, **changes)
    assert '\n' not in str(error.value)


def test_an_output_that_is_no_folder_and_too_many_parts(tmp_path):
    data = wikitext(tmp_path / 'data')
    (tmp_path / 'file').touch()
    with pytest.raises(InputError, match='cannot write to the output folder .*file/x'):
        language_model.train(settings_of(language_model, data, tmp_path / 'file' / 'x'), ONE)
    settings = settings_of(language_model, data, tmp_path / 'x', length=16, batch=2, accumulate=4)
    with pytest.raises(InputError, match='a batch of 2 cannot be divided into 4 parts'):
        language_model.train(settings, ONE)


def test_options_are_the_settings():
    words = ['generate', '--preset', 'small', *options(data_dir='d', output='o', lr=0.5, rel_pos_lr_scale=30)]
    command, settings, resume = parse('about', language_model.PRESETS, ('train', 'generate'), words)
    assert (command, settings.lr, settings.rel_pos_lr_scale, settings.depth, resume) == (
        'generate',
        0.5,
        30.0,
        2,
        False,
    )
    with pytest.raises(InputError, match='--output is missing'):
        parse('about', language_model.PRESETS, ('train',), ['--data-dir', 'd'])


def models(tmp_path):
    masked = settings_of(masked_language_model, tmp_path, tmp_path, weight_decay=0.01)
    yield masked, masked_language_model.MaskedLanguageModel(masked), 1
    yield masked, masked_language_model.Classifier(masked, 2), 1
    both = settings_of(translation, tmp_path, tmp_path, weight_decay=0.01)
    yield both, translation.Translator(both), 2
    words = settings_of(language_model, tmp_path, tmp_path, weight_decay=0.01)
    yield words, language_model.LanguageModel(words, 2000), 1


def test_relative_position_biases_do_not_decay(tmp_path):
    """A bias that learns 30 times as fast would else decay 30 times as fast."""
    for settings, model, tables in models(tmp_path):
        groups = build_optimizer(settings.optimization(), model).param_groups
        decay = {id(p): group['weight_decay'] for group in groups for p in group['params']}
        named = {name: decay[id(p)] for name, p in model.named_parameters()}
        found = {name: value for name, value in named.items() if 'rel_pos_bias' in name}
        assert list(found.values()) == [0.0] * tables
        assert {value for name, value in named.items() if name.endswith('qkv.weight')} == {0.01}
