"""The language model on files in WikiText's format: training, resuming, decoding, refusals."""

import math

import numpy as np
import pytest
import torch

from examples.language import language_model as example
from examples.language.training import order
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.errors import InputError

from ..engine.running import ONE
from .running import TINY, changed, command, options, printed, settings_of, straight_and_resumed, wikitext

SMALL = {'length': 16, 'batch': 8, 'feature_dim': 8, 'cutoffs': '6,12'}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return wikitext(tmp_path_factory.mktemp('wikitext'))


def test_paper_settings_are_the_default():
    paper = next(iter(example.PRESETS.values()))
    said = (paper.depth, paper.dim, paper.num_heads, paper.mlp_dim, paper.feature_dim, paper.length, paper.batch)
    assert said == (6, 512, 8, 2048, 64, 512, 64)
    assert (paper.lr, paper.beta2, paper.eps, paper.steps, paper.warmup_steps) == (2e-3, 0.98, 1e-6, 150_000, 6000)
    assert (paper.decay, paper.variant) == ('inverse_sqrt', 'nprf_bias')


def test_ten_steps_in_one_go_and_resumed_are_the_same(data, tmp_path):
    whole, parts = straight_and_resumed(example, data, tmp_path, **SMALL)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_it_learns(data, tmp_path):
    before = example.train(settings_of(example, data, tmp_path / '1', **SMALL, steps=1), ONE)
    after = example.train(settings_of(example, data, tmp_path / '40', **SMALL, steps=40), ONE)
    assert after['valid_perplexity'] < 0.8 * before['valid_perplexity']


@pytest.mark.parametrize('variant', example.VARIANTS)
def test_decoding_is_the_forward_pass(variant, data, tmp_path):
    settings = settings_of(example, data, tmp_path, **SMALL, variant=variant)
    torch.manual_seed(0)
    model = example.LanguageModel(settings, 22).eval()
    words = torch.randint(22, (1, settings.length + 1))
    decoder, total = example.Decoder(model), 0.0
    for t in range(settings.length):
        total -= float(decoder.step(words[:, t])[0, words[0, t + 1]])
    whole = float(model(words, torch.zeros(1, dtype=torch.long)).detach())
    assert total == pytest.approx(whole, rel=1e-4)
    other = words.clone()
    other[0, 0] = (other[0, 0] + 1) % 22
    assert (
        abs(float(model(other, torch.zeros(1, dtype=torch.long)).detach()) - whole) > 1e-3
    )  # a wrong first word is noticed


@pytest.mark.parametrize('context', [0, 5, 15])
def test_every_word_is_evaluated_once(context, data, tmp_path):
    settings = settings_of(example, data, tmp_path, **SMALL, context=context)
    task = example.LanguageTask(settings, ONE)
    task.model.eval()
    words = np.asarray(task.data['valid'])
    with torch.inference_mode():
        found = task.evaluate('valid', ONE)
    assert found['words'] == len(words) - 1
    total = 0.0
    for t in range(1, len(words)):  # each word by itself, from the words that its window has before it
        start = 0 if t <= settings.length else (t - 1 - context) // (16 - context) * (16 - context)
        window = np.full(17, -1)
        window[: t - start + 1] = words[start : t + 1]
        with torch.inference_mode():
            total += float(task.model(torch.from_numpy(window)[None], torch.tensor([t - start - 1])))
    assert found['loss'] == pytest.approx(total / (len(words) - 1), rel=1e-4)


def test_each_epoch_has_every_sample_once():
    assert sorted(order(0, 7, 14, 7)) == list(range(7))
    assert list(order(0, 7, 5, 4)) == [*order(0, 7, 5, 2), *order(0, 7, 7, 2)]
    assert list(order(0, 7, 0, 7)) != list(order(0, 7, 7, 7))


def test_words_and_ends_of_lines(data, tmp_path):
    settings = settings_of(example, data, tmp_path)
    vocabulary = example.Vocabulary.of(settings)
    text = (data / 'wiki.valid.tokens').read_text()
    ids = [i for line in vocabulary.encode(data / 'wiki.valid.tokens') for i in line]
    assert [vocabulary.words[i] for i in ids] == text.replace('\n', ' <eos> ').split()
    counts = [
        (data / 'wiki.train.tokens').read_text().split().count(word) for word in vocabulary.words if word != '<eos>'
    ]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ('file', 'content', 'said'),
    [
        ('wiki.train.tokens', None, 'no file .*wiki.train.tokens: expected'),
        ('wiki.test.tokens', None, 'no file .*wiki.test.tokens: expected'),
        ('wiki.train.tokens', b' \n \n', 'is empty'),
        ('wiki.train.tokens', b' = Heading = \n The king of France . \n', 'has no <unk>'),
        ('wiki.train.tokens', ' <unk> König \n'.encode('latin-1'), 'is not UTF-8'),
        ('wiki.valid.tokens', b' the emperor \n', r"wiki.valid.tokens:1: the word 'emperor' is not in"),
        ('wiki.train.tokens', b' the <unk> . \n', 'expected more than one sequence of 16'),
    ],
)
def test_wrong_files_are_refused_in_one_line(file, content, said, data, tmp_path):
    with changed(data / file, content), pytest.raises(InputError, match=said) as error:
        example.train(settings_of(example, data, tmp_path, **SMALL), ONE)
    assert '\n' not in str(error.value)


def test_other_settings_are_not_resumed(data, tmp_path):
    example.train(settings_of(example, data, tmp_path, **SMALL, steps=1), ONE)
    with pytest.raises(InputError, match='--resume continues it'):
        example.train(settings_of(example, data, tmp_path, **SMALL), ONE)
    with pytest.raises(InputError, match='steps 1 there, 10 here'):
        example.train(settings_of(example, data, tmp_path, **SMALL), ONE, True)
    with pytest.raises(InputError, match='nothing to resume'):
        example.train(settings_of(example, data, tmp_path / 'nowhere', **SMALL), ONE, True)


def test_as_a_command(data, tmp_path):
    """Two processes learn what one does; then words are generated from cached states."""
    tiny = {**TINY, **SMALL, 'dropout': 0.0, 'data_dir': data}
    alone = settings_of(example, data, tmp_path / 'one', **SMALL, dropout=0.0)
    expected = example.train(alone, ONE)
    said = command(
        'language_model', 'train', *options(**tiny, output=tmp_path / 'two', amp='none', threads=1), processes=2
    )
    assert printed(said, 'test: loss') == pytest.approx(expected['test_loss'], abs=2e-3)
    one, two = (read_checkpoint(tmp_path / name / 'last.pt')['state_dict'] for name in ('one', 'two'))
    assert all(torch.allclose(one[name], two[name], atol=2e-4) for name in one)
    said = command(
        'language_model', 'generate', *options(data_dir=data, output=tmp_path / 'two', prompt='the king', words=5)
    )
    assert said.startswith('the king ') and 3 <= len(said.split()) <= 7


def test_a_mistake_is_one_line_of_a_command(data, tmp_path):
    said = command('language_model', 'train', *options(data_dir=tmp_path / 'none', output=tmp_path), code=2)
    assert said.count('\n') == 1 and said.startswith('error: no file')


def test_autocast(data, tmp_path):
    found = example.train(settings_of(example, data, tmp_path, **SMALL, amp='bfloat16', accumulate=2), ONE)
    assert math.isfinite(found['test_perplexity'])


def test_a_faster_bias(data, tmp_path):
    """`rel_pos_lr_scale` moves the bias further; without a bias it is refused."""
    tables = []
    for scale in (1.0, 30.0):
        folder = tmp_path / str(scale)
        example.train(settings_of(example, data, folder, **SMALL, rel_pos_lr_scale=scale), ONE)
        tables.append(read_checkpoint(folder / 'last.pt')['state_dict']['rel_pos_bias.table'].std())
    assert tables[1] > 2 * tables[0]
    with pytest.raises(InputError, match='no relative position bias'):
        example.train(settings_of(example, data, tmp_path / 'x', **SMALL, variant='elu', rel_pos_lr_scale=30.0), ONE)
