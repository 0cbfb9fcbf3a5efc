"""Translation on files in IWSLT14's format: training, resuming, beam search, refusals."""

import itertools

import pytest
import torch

from examples.language import translation as example
from nprf_vit.errors import InputError

from ..engine.running import ONE
from .running import changed, command, options, pairs, printed, settings_of, straight_and_resumed

SMALL = {'vocabulary': 60, 'length': 24, 'tokens': 200, 'encoder_features': 8, 'decoder_features': 8}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return pairs(tmp_path_factory.mktemp('iwslt14'))


def test_paper_settings_are_the_default():
    paper = next(iter(example.PRESETS.values()))
    assert (paper.depth, paper.dim, paper.num_heads, paper.encoder_features, paper.decoder_features) == (
        6,
        512,
        4,
        16,
        24,
    )
    assert (paper.smoothing, paper.dropout, paper.tokens, paper.vocabulary) == (0.1, 0.3, 8192, 10_000)
    assert (paper.steps, paper.warmup_steps, paper.lr, paper.beam, paper.length_penalty) == (50_000, 4000, 5e-4, 5, 1.2)


def test_ten_steps_in_one_go_and_resumed_are_the_same(data, tmp_path):
    whole, parts = straight_and_resumed(example, data, tmp_path, **SMALL)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize('variant', example.VARIANTS)
def test_padding_and_later_tokens_change_nothing(variant, data, tmp_path):
    torch.manual_seed(0)
    model = example.Translator(settings_of(example, data, tmp_path, **SMALL, variant=variant)).eval()
    source, target = torch.randint(4, 60, (2, 7)), torch.randint(4, 60, (2, 6))
    with torch.inference_mode():
        logits = model.decode(target, model.encode(source), source != example.PAD)
        more = torch.cat([source, torch.zeros(2, 5, dtype=torch.long)], 1)
        longer = torch.cat([target, torch.randint(4, 60, (2, 3))], 1)
        again = model.decode(longer, model.encode(more), more != example.PAD)[:, :6]
        torch.testing.assert_close(again, logits, atol=2e-4, rtol=2e-4)
        other = model.decode(target, model.encode(source.flip(1)), source != example.PAD)
    assert (other - logits).abs().max() > 1e-3  # another source is noticed


def test_a_wide_beam_finds_the_best_of_all_translations(data, tmp_path):
    """Against every sequence of up to two tokens; a beam as wide as the vocabulary leaves none out."""
    torch.manual_seed(0)
    settings = settings_of(example, data, tmp_path, **{**SMALL, 'vocabulary': 8, 'length': 4}, variant='standard')
    model = example.Translator(settings).eval()
    model.embed.weight.data *= 3  # far from uniform
    source, words = torch.randint(4, 8, (3, 2)), range(4, 8)
    candidates = [[*text] for n in (0, 1, 2) for text in itertools.product(words, repeat=n)]
    found = model.translate(source, beam=8, length_penalty=1.2)
    for row, said in zip(source, found):
        scores = []
        for text in candidates:
            target = torch.tensor([[example.BEGIN, *text, example.END]])
            with torch.inference_mode():
                scores.append(-float(model(row[None], target, 0.0)) / (len(text) + 1) ** 1.2)
        assert said == candidates[max(range(len(scores)), key=scores.__getitem__)]


def test_batches_hold_every_pair_once_and_are_no_larger_than_asked(data, tmp_path):
    task = example.TranslationTask(settings_of(example, data, tmp_path, **SMALL), ONE)
    assert sorted(i for batch in task.batches for i in batch) == list(range(120))
    lengths = [max(max(map(len, task.data['train'][i])) for i in batch) * len(batch) for batch in task.batches]
    assert max(lengths) <= 200 and len(task.batches) > 1
    whole, count = task.share(3, 0, 1)
    shares = [task.share(3, part, 3) for part in range(3)]
    assert sum(number for _, number in shares) == count
    assert task.share(3, 199, 200)[1] == 0  # a process without a pair counts none


@pytest.mark.parametrize(
    ('file', 'content', 'said'),
    [
        ('train.de', None, 'no file .*train.de: expected'),
        ('test.en', b'', 'test.en is empty'),
        ('valid.en', b'one line only\n', 'has 10 lines and .*valid.en 1: expected translations line by line'),
        ('train.en', 'naïve\n'.encode('latin-1'), 'is not UTF-8'),
    ],
)
def test_wrong_files_are_refused_in_one_line(file, content, said, data, tmp_path):
    with changed(data / file, content), pytest.raises(InputError, match=said) as error:
        example.train(settings_of(example, data, tmp_path, **SMALL), ONE)
    assert '\n' not in str(error.value)


def test_too_little_text_for_the_vocabulary(data, tmp_path):
    with pytest.raises(InputError, match='gives no vocabulary of 5000'):
        example.train(settings_of(example, data, tmp_path, **{**SMALL, 'vocabulary': 5000}), ONE)


@pytest.mark.slow
def test_it_learns_to_translate(data, tmp_path):
    changes = {**SMALL, 'steps': 400, 'warmup_steps': 40, 'dim': 64, 'dropout': 0.0, 'lr': 3e-3, 'log_interval': 100}
    changes['rel_pos_lr_scale'] = 30.0  # which of two nouns comes first is told by the bias alone
    assert example.train(settings_of(example, data, tmp_path, **changes), ONE)['test_bleu'] > 60
    (tmp_path / 'new.de').write_text('der alte König saw der Schiff .\n', encoding='utf-8')
    place = options(data_dir=data, output=tmp_path, input=tmp_path / 'new.de', device='cpu')
    assert command('translation', 'translate', *place).strip() == 'the old king saw the ship .'


@pytest.mark.slow
def test_under_torchrun(data, tmp_path):
    settings = settings_of(example, data, tmp_path / 'one', **SMALL, dropout=0.0)
    expected = example.train(settings, ONE)
    words = options(**{**SMALL, 'steps': 10, 'warmup_steps': 2, 'lr': 1e-2, 'depth': 1, 'dim': 16, 'num_heads': 2})
    words += options(mlp_dim=32, dropout=0.0, data_dir=data, output=tmp_path / 'two', device='cpu', threads=1)
    said = command('translation', 'train', '--preset', 'small', *words, processes=2)
    assert printed(said, 'valid: loss') == pytest.approx(expected['valid_loss'], abs=2e-3)
