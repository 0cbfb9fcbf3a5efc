"""Masked pre-training on plain text, and fine-tuning on files in GLUE's formats."""

import dataclasses

import numpy as np
import pytest
import torch

from examples.language import masked_language_model as example
from nprf_vit.errors import InputError

from ..engine.running import ONE
from .running import changed, command, documents, options, printed, sentences, settings_of, straight_and_resumed

SMALL = {'vocabulary': 60, 'length': 24, 'batch': 8, 'feature_dim': 8}
# a header and a line of each task as GLUE distributes them; {} is a sentence, the label comes last or as said
LINES = {
    'SST-2': ('sentence\tlabel', '{0} \t{label}', ('0', '1')),
    'MRPC': ('\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String', '{label}\t702876\t702977\t{0}\t{1}', ('0', '1')),
    'QQP': (
        'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate',
        '133273\t213221\t213222\t{0}\t{1}\t{label}',
        ('0', '1'),
    ),
    'STS-B': (
        'index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore',
        '0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\t{0}\t{1}\t{label}',
        ('5.000', '3.800', '1.600'),
    ),
    'MNLI': (
        'index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t'
        'sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label',
        '0\t31193\t31193n\tgovernment\t( x )\t( x )\t(ROOT)\t(ROOT)\t{0}\t{1}\t{label}\t{label}',
        ('neutral', 'entailment', 'contradiction'),
    ),
    'QNLI': ('index\tquestion\tsentence\tlabel', '0\t{0}\t{1}\t{label}', ('entailment', 'not_entailment')),
    'RTE': ('index\tsentence1\tsentence2\tlabel', '0\t{0}\t{1}\t{label}', ('entailment', 'not_entailment')),
    'CoLA': (None, 'gj04\t{label}\t\t{0}', ('0', '1')),
}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return documents(tmp_path_factory.mktemp('text'))


@pytest.fixture(scope='module')
def glue(tmp_path_factory):
    root = tmp_path_factory.mktemp('glue')
    for task, (header, line, labels) in LINES.items():
        (root / task).mkdir()
        for seed, name in enumerate(('train.tsv', *example.GLUE[task].dev)):
            texts = sentences(40, seed)
            rows = [line.format(*pair, label=labels[i % len(labels)]) for i, pair in enumerate(zip(texts, texts[1:]))]
            content = '\n'.join(([header] if header else []) + rows) + '\n'
            (root / task / name).write_text(content, encoding='utf-8')
    return root


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):
    settings = settings_of(example, data, tmp_path_factory.mktemp('trained'), **SMALL)
    example.train(settings, ONE)
    return settings


def test_paper_settings_are_the_default():
    paper = next(iter(example.PRESETS.values()))
    assert (paper.depth, paper.dim, paper.num_heads, paper.mlp_dim, paper.length, paper.batch) == (
        12,
        768,
        12,
        3072,
        512,
        2048,
    )
    assert (paper.masked, paper.eps, paper.lr, paper.warmup_steps, paper.steps) == (0.15, 1e-6, 2e-4, 20_000, 1_000_000)
    assert (paper.decay, paper.clip_grad) == ('linear', 1.0)


def test_ten_steps_in_one_go_and_resumed_are_the_same(data, tmp_path):
    whole, parts = straight_and_resumed(example, data, tmp_path, **SMALL)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_masking():
    tokens = np.concatenate([[example.CLS], np.arange(5, 2005), [example.SEP]])
    inputs, targets = example.mask_tokens(tokens, 0.15, 3000, seed=0)
    chosen = targets >= 0
    assert chosen.sum() == 300 and not chosen[[0, -1]].any()
    assert (targets[chosen] == tokens[chosen]).all() and (inputs[~chosen] == tokens[~chosen]).all()
    shares = []
    for seed in range(20):  # 6000 chosen tokens
        hidden, truth = example.mask_tokens(tokens, 0.15, 3000, seed)
        hidden, truth = hidden[truth >= 0], truth[truth >= 0]
        shares.append(((hidden == example.MASK).mean(), (hidden == truth).mean()))
    assert np.mean(shares, 0) == pytest.approx([0.8, 0.1], abs=0.02)
    again, _ = example.mask_tokens(tokens, 0.15, 3000, seed=1)
    assert (again != inputs).any()


@pytest.mark.parametrize('variant', example.VARIANTS)
def test_padding_changes_nothing(variant, data, tmp_path):
    torch.manual_seed(0)
    model = example.Classifier(settings_of(example, data, tmp_path, **SMALL, variant=variant), 2).eval()
    for module in model.modules():  # as initialised, what others say hardly counts
        if isinstance(module, torch.nn.Linear):
            module.weight.data *= 20
    tokens = torch.randint(5, 60, (3, 9))
    longer = torch.cat([tokens, torch.zeros(3, 6, dtype=torch.long)], 1)
    with torch.inference_mode():
        scores = model.scores(tokens, torch.zeros_like(tokens))
        torch.testing.assert_close(model.scores(longer, torch.zeros_like(longer)), scores, atol=1e-4, rtol=1e-4)
        longer[:, 9:] = 7  # not padding
        assert (model.scores(longer, torch.zeros_like(longer)) - scores).abs().max() > 1e-2


@pytest.mark.parametrize('task', example.GLUE)
def test_every_task_of_glue(task, trained, glue):
    settings = dataclasses.replace(trained, task=task, glue_dir=str(glue), learning_rates='1e-3', epochs=1.0)
    score = example.finetune(settings, ONE)[task]
    assert -100 <= score <= 100
    rows = example.read_glue(glue / task / 'train.tsv', example.GLUE[task])
    texts = sentences(40, 0)
    assert len(rows) == 39 and rows[3][0].strip() == texts[3]
    assert rows[3][1] == (None if example.GLUE[task].second is None else texts[4])


def test_metrics():
    """By hand: 3 true positives, 1 false positive, 1 false negative, 5 true negatives."""
    truth, said = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0]), np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0])
    assert example.METRICS['accuracy'](truth, said) == pytest.approx(0.8)
    assert example.METRICS['f1'](truth, said) == pytest.approx(0.75)
    assert example.METRICS['matthews'](truth, said) == pytest.approx((3 * 5 - 1) / (4 * 4 * 6 * 6) ** 0.5)
    assert example.METRICS['pearson'](truth, 3 * truth + 1) == pytest.approx(1)
    assert example.METRICS['spearman'](np.arange(5), np.arange(5) ** 3) == pytest.approx(1)


@pytest.mark.parametrize(
    ('file', 'content', 'said'),
    [
        ('train.txt', None, 'no file .*train.txt: expected text'),
        ('valid.txt', b'\n\n', 'valid.txt is empty'),
        ('valid.txt', b'the king .\n', 'valid.txt has .* tokens: expected at least one sequence of 22'),
    ],
)
def test_wrong_text_is_refused_in_one_line(file, content, said, data, tmp_path):
    with changed(data / file, content), pytest.raises(InputError, match=said) as error:
        example.train(settings_of(example, data, tmp_path, **SMALL), ONE)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('content', 'said'),
    [
        (None, 'no file .*train.tsv'),
        (b'index\tsentence1\tlabel\n0\ta\tentailment\n', 'has no column sentence2'),
        (b'index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n', 'train.tsv:2: 1 lines lack a column'),
        (b'index\tsentence1\tsentence2\tlabel\n0\ta\n', 'train.tsv:2: 1 lines lack a column'),
    ],
)
def test_wrong_tables_are_refused_in_one_line(content, said, trained, glue):
    settings = dataclasses.replace(trained, task='RTE', glue_dir=str(glue))
    with changed(glue / 'RTE' / 'train.tsv', content), pytest.raises(InputError, match=said) as error:
        example.finetune(settings, ONE)
    assert '\n' not in str(error.value)


def test_all_tables_are_looked_at_before_the_first_task(trained, glue, capsys):
    settings = dataclasses.replace(trained, task='all', glue_dir=str(glue))
    with changed(glue / 'RTE' / 'dev.tsv', None), pytest.raises(InputError, match='no file .*RTE/dev.tsv'):
        example.finetune(settings, ONE)
    assert 'learning rate' not in capsys.readouterr().out


def test_the_grid_of_learning_rates(trained, glue, capsys):
    """The best of the grid counts, and every entry is printed with its metrics; a constant answer scores 0."""
    settings = dataclasses.replace(trained, task='STS-B', glue_dir=str(glue), learning_rates='1e-3,0', epochs=0.5)
    best = example.finetune(settings, ONE)['STS-B']
    lines = [line for line in capsys.readouterr().out.splitlines() if 'learning rate' in line]
    assert [line.split(': ')[0].split('learning rate ')[1] for line in lines] == ['0.001', '0']
    found = [[float(part.split()[-1]) for part in line.split(': ')[1].split(',')] for line in lines]
    assert best == pytest.approx(max(np.mean(pair) for pair in found), abs=1e-3)


@pytest.mark.slow
def test_as_a_command(data, glue, tmp_path):
    """Under torchrun with accumulation, to what one process learns; then all of GLUE."""
    settings = settings_of(example, data, tmp_path / 'one', **SMALL, dropout=0.0)
    expected = example.train(settings, ONE)
    words = options(**{**SMALL, 'steps': 10, 'warmup_steps': 2, 'lr': 1e-2, 'depth': 1, 'dim': 16, 'num_heads': 2})
    words += options(mlp_dim=32, dropout=0.0, data_dir=data, output=tmp_path / 'two', device='cpu', accumulate=2)
    said = command('masked_language_model', 'train', '--preset', 'small', *words, processes=2)
    assert printed(said, 'valid: loss') == pytest.approx(expected['valid_loss'], abs=2e-3)
    place = options(data_dir=data, output=tmp_path / 'two', glue_dir=glue, epochs=1, learning_rates='1e-3,1e-4')
    said = command('masked_language_model', 'finetune', *place, *options(device='cpu'))
    assert said.strip().split('\n')[-1].startswith('CoLA ') and 'average' in said
