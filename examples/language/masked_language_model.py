r"""Masked pre-training of BERT-base with kernelized attention and a 1-D relative bias, and fine-tuning on GLUE.

The paper's table (GLUE, average over tasks): NPRF with bias 85.2. Not run here.

  torchrun --nproc-per-node 8 -m examples.language.masked_language_model train --data-dir TEXT --output output/bert \
      --amp bfloat16 --accumulate 16
  python -m examples.language.masked_language_model finetune --data-dir TEXT --output output/bert --glue-dir GLUE

TEXT has train.txt and valid.txt (and test.txt, if there is one), as BERT's own preparation takes text: a sentence or a
paragraph per line, an empty line between documents. GLUE is the folder of the benchmark's archives, unpacked: CoLA,
SST-2, MRPC, QQP, STS-B, MNLI, QNLI, RTE, each with train.tsv and dev.tsv (MNLI: dev_matched.tsv, dev_mismatched.tsv).
The paper's: BERT-base, length 512, batch 2048, 15 % of the tokens masked (80 % by the mask, 10 % by another token, 10 %
as they are), Adam with epsilon 1e-6, peak 2e-4, 20,000 steps of warm-up, linear decay, 1,000,000 steps, clipping at 1.
Our choices: pre-norm blocks, no next-sentence task, BPE of 30,000 by sentencepiece, 64 features, weight decay 0.01,
dropout 0.1, learned absolute positions where there is no bias; in fine-tuning batch 32, 3 epochs, 6 % of warm-up, and
the grid of learning rates, of which we know only that the paper has one.

Measured here: `--preset small` on other real text; docs/language.md has the commands, docs/results.md the numbers.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from timm.layers import trunc_normal_
from torch import nn

from examples.language import training
from examples.language.settings import InputError, Settings, key
from examples.language.training import Batch, Place, TextModel, order, part_of, read_lines
from nprf_vit.layers import KernelBlock, RelPosBias
from nprf_vit.ops.precision import without_autocast

PAD, UNKNOWN, CLS, SEP, MASK = range(5)  # numbers of the special tokens
Row = tuple[str, str | None, float]  # of GLUE: a text, another for tasks of pairs, the label
SPECIAL, TEXT = 5, 'text, a sentence or paragraph per line, an empty line between documents'
VARIANTS = {
    'nprf_bias': {'kernel': 'prf', 'normalize': True, 'rel_pos': True},
    'prf': {'kernel': 'prf', 'normalize': False, 'rel_pos': False},
    'softmax': {'kernel': 'softmax', 'normalize': False, 'rel_pos': False},
    'softmax_bias': {'kernel': 'softmax', 'normalize': False, 'rel_pos': True},
}


@dataclass(frozen=True)
class MaskedSettings(Settings):
    """The paper's, unless changed."""

    variant: str = key('nprf_bias', f'one of {", ".join(VARIANTS)}')
    depth: int = key(12, 'layers')
    dim: int = key(768, 'width')
    num_heads: int = key(12, 'attention heads')
    mlp_dim: int = key(3072, 'width of the feed-forward layers')
    feature_dim: int = key(64, 'random features per head')
    dropout: float = key(0.1, 'of embedding, attention output and feed-forward', most=0.99)
    vocabulary: int = key(30_000, 'tokens, special ones included')
    length: int = key(512, 'tokens per sequence', least=3)
    batch: int = key(2048, 'sequences per update, over all processes')
    masked: float = key(0.15, 'share of the tokens that are to be predicted', least=0.01, most=1)
    glue_dir: str = key('', "folder of GLUE's tasks, for finetune", free=True)
    task: str = key('all', 'task of GLUE to fine-tune on, or all', free=True)
    learning_rates: str = key('1e-5,2e-5,3e-5,4e-5,5e-5', 'of fine-tuning; the best on dev counts', free=True)
    epochs: float = key(3.0, 'of fine-tuning', free=True)
    glue_batch: int = key(32, 'sentences or pairs per update of fine-tuning', free=True)
    glue_length: int = key(128, 'tokens at most of a sentence or pair', free=True, least=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice('variant', VARIANTS)
        self.check_choice('task', ('all', *GLUE))
        self.check_heads(self.dim, self.num_heads)
        self.numbers('learning_rates', float)


class Glue(NamedTuple):
    """A task: columns by their names in the header (by number, where there is none), labels, metrics."""

    first: str
    second: str | None
    label: str
    labels: tuple[str, ...]  # none: a number is to be predicted
    metrics: tuple[str, ...] = ('accuracy',)
    dev: tuple[str, ...] = ('dev.tsv',)
    header: bool = True


_BINARY, _ENTAILMENT = ('0', '1'), ('entailment', 'not_entailment')
GLUE = {
    'CoLA': Glue('3', None, '1', _BINARY, ('matthews',), header=False),
    'SST-2': Glue('sentence', None, 'label', _BINARY),
    'MRPC': Glue('#1 String', '#2 String', 'Quality', _BINARY, ('f1', 'accuracy')),
    'QQP': Glue('question1', 'question2', 'is_duplicate', _BINARY, ('f1', 'accuracy')),
    'STS-B': Glue('sentence1', 'sentence2', 'score', (), ('pearson', 'spearman')),
    'MNLI': Glue(
        'sentence1', 'sentence2', 'gold_label', ('contradiction', 'entailment', 'neutral'),
        dev=('dev_matched.tsv', 'dev_mismatched.tsv'),
    ),
    'QNLI': Glue('question', 'sentence', 'label', _ENTAILMENT),
    'RTE': Glue('sentence1', 'sentence2', 'label', _ENTAILMENT),
}  # fmt: skip
METRICS = {
    'accuracy': lambda truth, said: float(np.mean(truth == said)),
    'f1': lambda truth, said: float(f1_score(truth, said)),
    'matthews': lambda truth, said: float(matthews_corrcoef(truth, said)),
    'pearson': lambda truth, said: float(pearsonr(truth, said).statistic),
    'spearman': lambda truth, said: float(spearmanr(truth, said).statistic),
}

PAPER = MaskedSettings(
    steps=1_000_000, warmup_steps=20_000, lr=2e-4, decay='linear', beta2=0.999, weight_decay=0.01, clip_grad=1.0,
    eval_interval=20_000,
)  # fmt: skip
PRESETS = {
    'paper': PAPER,
    # minutes of one core, on text of some hundred thousand words
    'small': replace(
        PAPER, steps=800, warmup_steps=80, lr=2e-3, depth=2, dim=128, num_heads=4, mlp_dim=512, feature_dim=32,
        vocabulary=4000, length=128, batch=16, eval_interval=0, threads=1,
    ),
}  # fmt: skip


def tokenizer_of(settings: MaskedSettings) -> sentencepiece.SentencePieceProcessor:
    """Byte-pair encoding of the training text, kept in the output folder."""
    kept, path = Path(settings.output) / 'tokens.model', Path(settings.data_dir) / 'train.txt'
    if not kept.is_file():
        lines = (line for line in read_lines(path, TEXT) if line.strip())
        ids = {'pad_id': PAD, 'unk_id': UNKNOWN, 'bos_id': -1, 'eos_id': -1}
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines, model_prefix=str(kept.with_suffix('')), vocab_size=settings.vocabulary,
                model_type='bpe', control_symbols=['<cls>', '<sep>', '<mask>'], **ids, max_sentence_length=1 << 20,
                input_sentence_size=2_000_000, minloglevel=2,
            )  # fmt: skip
        except RuntimeError as error:  # sentencepiece's word for a text that is too short
            raise InputError(f'{path} gives no vocabulary of {settings.vocabulary}: {str(error)[-120:]}') from None
    return sentencepiece.SentencePieceProcessor(model_file=str(kept))


class Encoder(nn.Module):
    """Tokens to vectors, each of which has seen all others."""

    def __init__(self, settings: MaskedSettings) -> None:
        super().__init__()
        variant, dim, heads = VARIANTS[settings.variant], settings.dim, settings.num_heads
        self.embed, self.segment_embed = nn.Embedding(settings.vocabulary, dim), nn.Embedding(2, dim)
        self.pos_embed, self.rel_pos_bias = None, None
        if variant['rel_pos']:  # 'clip': a shorter sequence takes the middle of the table, not a compressed one
            dense = variant['kernel'] == 'softmax'
            self.rel_pos_bias = RelPosBias((settings.length,), heads, dense, extend='clip')
        else:
            self.pos_embed = nn.Parameter(torch.zeros(settings.length, dim))
        self.norm_in, self.drop, self.norm = nn.LayerNorm(dim), nn.Dropout(settings.dropout), nn.LayerNorm(dim)
        attention = {name: variant[name] for name in ('kernel', 'normalize')}
        attention |= {'feature_dim': settings.feature_dim, 'seed': settings.seed}
        self.blocks = nn.ModuleList(
            KernelBlock(dim, heads, settings.mlp_dim / dim, proj_drop=settings.dropout, depth=i, **attention)
            for i in range(settings.depth)
        )
        self.apply(init_weights)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor, padded: bool = False) -> torch.Tensor:
        """Tokens and segments (B, N) to (B, N, C); with `padded`, nothing attends to tokens that are PAD."""
        x = self.embed(tokens) + self.segment_embed(segments)
        x = x if self.pos_embed is None else x + self.pos_embed[: tokens.shape[1]]
        x = self.drop(self.norm_in(x))
        bias = None if self.rel_pos_bias is None else self.rel_pos_bias((tokens.shape[1],))
        for block in self.blocks:
            x = block(x, bias, tokens != PAD if padded else None)
        return self.norm(x)


def init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        trunc_normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class MaskedLanguageModel(TextModel):
    """Predicts the tokens that were masked; the last layer's weights are the embedding's."""

    def __init__(self, settings: MaskedSettings) -> None:
        super().__init__()
        self.encoder = Encoder(settings)
        self.dense, self.norm = nn.Linear(settings.dim, settings.dim), nn.LayerNorm(settings.dim)
        self.bias = nn.Parameter(torch.zeros(settings.vocabulary))
        init_weights(self.dense)

    def logits(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Of the chosen tokens, (n, V); only these are computed."""
        x = self.norm(F.gelu(self.dense(self.encoder(tokens, torch.zeros_like(tokens))[chosen])))
        with without_autocast(x):
            return x.float() @ self.encoder.embed.weight.float().T + self.bias

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Masked tokens and targets (B, N), -1 where there is nothing to predict, to the sum of -log p."""
        return F.cross_entropy(self.logits(tokens, targets >= 0), targets[targets >= 0], reduction='sum')


def mask_tokens(tokens: np.ndarray, share: float, vocabulary: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A share of a sequence's tokens to predict: 80 % masked, 10 % replaced, 10 % kept. Returns inputs and targets."""
    rng = np.random.default_rng(seed)
    free = np.flatnonzero(tokens >= SPECIAL)
    chosen = rng.permutation(free)[: max(1, round(share * len(free)))]
    inputs, targets, how = tokens.copy(), np.full_like(tokens, -1), rng.random(len(chosen))
    targets[chosen] = tokens[chosen]
    inputs[chosen[how < 0.8]] = MASK
    swapped = chosen[(how >= 0.8) & (how < 0.9)]
    inputs[swapped] = rng.integers(SPECIAL, vocabulary, len(swapped))
    return inputs, targets


class MaskedTask:
    """Text in sequences <cls> … <sep>, documents divided by <sep>, masked anew each time."""

    def __init__(self, settings: MaskedSettings, place: Place) -> None:
        self.settings = settings
        place.from_main(lambda: tokenizer_of(settings) and None)  # one process trains it
        self.tokenizer = tokenizer_of(settings)
        self.splits = ['train', 'valid', *(['test'] if (Path(settings.data_dir) / 'test.txt').is_file() else [])]
        place.from_main(lambda: [len(self.sequences(split)) for split in self.splits])
        self.data = {split: self.sequences(split) for split in self.splits}
        self.model = MaskedLanguageModel(settings)

    def sequences(self, split: str) -> np.ndarray:
        """(sequences, length-2) tokens."""
        path, width = Path(self.settings.data_dir) / f'{split}.txt', self.settings.length - 2
        size = path.stat().st_size if path.is_file() else 0
        ids = training.keep_ids(Path(self.settings.output) / f'{split}-{size}.ids', lambda: self.encode(path))
        if len(ids) < width:
            raise InputError(f'{path} has {len(ids)} tokens: expected at least one sequence of {width}')
        return ids[: len(ids) // width * width].reshape(-1, width)

    def encode(self, path: Path) -> Iterator[list[int]]:
        for line in read_lines(path, TEXT):
            yield self.tokenizer.encode(line) if line.strip() else [SEP]

    def batch_of(self, split: str, chosen: np.ndarray, *seed: int | str) -> tuple[Batch, int]:
        s = self.settings
        pairs = []
        for i in chosen:
            row = np.concatenate([[CLS], self.data[split][i], [SEP]]).astype(np.int64)
            pairs.append(mask_tokens(row, s.masked, s.vocabulary, training.derive_seed(*seed, int(i))))
        inputs, targets = (torch.from_numpy(np.stack(rows)) for rows in zip(*pairs))
        return (inputs, targets), int((targets >= 0).sum())

    def share(self, step: int, part: int, parts: int) -> tuple[Batch, int]:
        s = self.settings
        chosen = part_of(order(s.seed, len(self.data['train']), step * s.batch, s.batch), part, parts)
        return self.batch_of('train', chosen, s.seed, 'mask', step)

    def evaluate(self, split: str, place: Place) -> dict[str, float]:
        """Loss and accuracy on masked tokens, the same ones for every model."""
        own = np.arange(place.rank, len(self.data[split]), place.world)
        total = torch.zeros(3, device=place.device)
        for chosen in np.array_split(own, math.ceil(len(own) / 16) or 1):
            if len(chosen):
                (inputs, targets), _ = self.batch_of(split, chosen, 'evaluation')
                inputs, targets = inputs.to(place.device), targets.to(place.device)
                logits, truth = self.model.logits(inputs, targets >= 0), targets[targets >= 0]
                loss, right = F.cross_entropy(logits, truth, reduction='sum'), (logits.argmax(-1) == truth).sum()
                total += torch.stack([loss, right.float(), torch.tensor(float(len(truth)), device=place.device)])
        loss, right, count = place.sum(total).tolist()
        return {'loss': loss / count, 'accuracy': 100 * right / count, 'tokens': count}


class Classifier(TextModel):
    """The encoder and a layer on its first token: classes, or one number."""

    def __init__(self, settings: MaskedSettings, classes: int) -> None:
        super().__init__()
        self.encoder = Encoder(settings)
        self.dense, self.drop = nn.Linear(settings.dim, settings.dim), nn.Dropout(settings.dropout)
        self.head = nn.Linear(settings.dim, classes)
        init_weights(self.dense), init_weights(self.head)

    def scores(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        x = self.encoder(tokens, segments, padded=True)[:, 0]
        return self.head(self.drop(torch.tanh(self.dense(x)))).float()

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.scores(tokens, segments)
        if scores.shape[1] == 1:
            return F.mse_loss(scores[:, 0], labels, reduction='sum')
        return F.cross_entropy(scores, labels.long(), reduction='sum')


def read_glue(path: Path, task: Glue) -> list[Row]:
    """The examples of a TSV file."""
    expected = f'a TSV file with the columns {task.first}, {task.second or "no second text"}, {task.label}'
    lines = [line.lstrip('\ufeff').split('\t') for line in read_lines(path, expected)]
    names = lines.pop(0) if task.header else [str(i) for i in range(len(lines[0]))]
    missing = [name for name in (task.first, task.second, task.label) if name is not None and name not in names]
    if missing:
        raise InputError(f'{path} has no column {", ".join(missing)}: expected {expected}')
    at, rows, bad = {name: i for i, name in enumerate(names)}, [], []
    for number, cells in enumerate(lines, 1 + task.header):
        try:
            label = cells[at[task.label]]
            value = float(task.labels.index(label)) if task.labels else float(label)
            rows.append((cells[at[task.first]], None if task.second is None else cells[at[task.second]], value))
        except (IndexError, ValueError):
            bad.append(number)
    if len(bad) > 0.001 * len(lines):  # QQP has a few lines that are cut off
        raise InputError(f'{path}:{bad[0]}: {len(bad)} lines lack a column or a known label: expected {expected}')
    return rows


class GlueTask:
    """Fine-tuning on one task of GLUE."""

    def __init__(self, settings: MaskedSettings, data: dict[str, list[Row]], weights: dict[str, torch.Tensor]) -> None:
        self.settings, self.task, self.data = settings, GLUE[settings.task], data
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(Path(settings.output) / 'tokens.model'))
        self.model = Classifier(settings, len(self.task.labels) or 1)
        own = {name.removeprefix('encoder.'): value for name, value in weights.items() if name.startswith('encoder.')}
        self.model.encoder.load_state_dict(own)

    def batch_of(self, rows: list[Row]) -> Batch:
        """<cls> first <sep> second <sep>, the longer text cut first, padded to the longest of the batch."""
        encoded = []
        for first, second, _ in rows:
            a, b = (self.tokenizer.encode(text or '') for text in (first, second))
            while len(a) + len(b) > self.settings.glue_length - 3:
                (a if len(a) >= len(b) else b).pop()
            left, right = [CLS, *a, SEP], [*b, SEP] if second is not None else []
            encoded.append((left + right, [0] * len(left) + [1] * len(right)))
        longest = max(len(tokens) for tokens, _ in encoded)
        padded = [[x + [0] * (longest - len(x)) for x in pair] for pair in encoded]
        tokens, segments = (torch.tensor(rows) for rows in zip(*padded))
        return tokens, segments, torch.tensor([label for *_, label in rows])

    def share(self, step: int, part: int, parts: int) -> tuple[Batch, int]:
        rows, s = self.data['train.tsv'], self.settings
        chosen = part_of(order(s.seed, len(rows), step * s.glue_batch, s.glue_batch), part, parts)
        return self.batch_of([rows[i] for i in chosen]), len(chosen)

    def evaluate(self, split: str, place: Place) -> dict[str, float]:
        """The task's metrics in percent, the mean over its dev files, whatever they are called."""
        found: dict[str, list[float]] = {name: [] for name in self.task.metrics}
        for name in self.task.dev:
            rows, said = self.data[name], []
            for first in range(0, len(rows), 64):
                tokens, segments, _ = self.batch_of(rows[first : first + 64])
                scores = self.model.scores(tokens.to(place.device), segments.to(place.device))
                said += (scores.argmax(-1) if self.task.labels else scores[:, 0]).float().tolist()
            truth = np.array([label for *_, label in rows])
            for metric in self.task.metrics:
                score = METRICS[metric](truth, np.array(said))
                found[metric].append(100 * score if math.isfinite(score) else 0.0)  # no correlation with a constant
        return {name: float(np.mean(values)) for name, values in found.items()}


def finetune(settings: MaskedSettings, place: Place, *_: object) -> dict[str, float]:
    """Every task at every learning rate of the grid; the best on dev counts, as in the papers."""
    if not settings.glue_dir:
        raise InputError('--glue-dir is missing')
    settings, weights = training.of_checkpoint(settings)
    files = {
        name: {file: read_glue(Path(settings.glue_dir) / name / file, task) for file in ('train.tsv', *task.dev)}
        for name, task in GLUE.items() if settings.task in ('all', name)
    }  # fmt: skip
    best = {}
    for name, data in files.items():
        scores = []
        for lr in settings.numbers('learning_rates', float):
            tuned = replace(settings, task=name, lr=lr, decay='linear', rel_pos_lr_scale=1.0)
            torch.manual_seed(training.derive_seed(settings.seed, 'glue'))
            task = GlueTask(tuned, data, weights)
            steps = max(1, round(settings.epochs * len(task.data['train.tsv']) / settings.glue_batch))
            tuned = replace(tuned, steps=steps, warmup_steps=max(1, round(0.06 * steps)), save_interval=steps + 1)
            trainer = training.Trainer(task, tuned, place)
            while trainer.step < steps:
                trainer.update()
            metrics = trainer.evaluate(f'{name} dev, learning rate {lr:g}')
            scores.append(float(np.mean(list(metrics.values()))))
        best[name] = max(scores)
    if place.is_main:
        said = ', '.join(f'{name} {score:.1f}' for name, score in best.items())
        print(f'{said}; average {np.mean(list(best.values())):.1f}')
    return best


def train(settings: MaskedSettings, place: Place, *more: object) -> dict[str, float] | None:
    has_test = (Path(settings.data_dir) / 'test.txt').is_file()
    return training.train_task(MaskedTask, settings, place, *more, splits=('valid', 'test') if has_test else ('valid',))


if __name__ == '__main__':
    sys.exit(training.run(__doc__, PRESETS, {'train': train, 'finetune': finetune}))
