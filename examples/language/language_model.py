"""Language modelling on WikiText-103: words, adaptive softmax, causal kernelized attention with a 1-D relative bias.

The paper's table (test perplexity): NPRF with bias 30.6, softmax 33.0, TRF 33.6, linear elu 38.4. Not run here.

  torchrun --nproc-per-node 8 -m examples.language.language_model train --data-dir wikitext-103 --output output/wt103
  ... --variant softmax, trf, elu or nprf_bias (the default): the four rows
  python -m examples.language.language_model generate --data-dir wikitext-103 --output output/wt103 --prompt 'The war'

DATA_DIR is wikitext-103-v1.zip unpacked: wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens.
The paper's: 6 layers, width 512, 8 heads, feed-forward 2048, 64 features, length 512, batch 64, Adam with betas 0.9 and
0.98 and epsilon 1e-6, peak 2e-3, 150,000 steps with 6000 of warm-up, inverse square root. Our choices: dropout 0.1, the
cutoffs of the adaptive softmax, pre-norm blocks, learned absolute positions where there is no bias, no context
before a block in evaluation.

Measured here: `--preset small` on other real text; docs/language.md has the commands, docs/results.md the numbers.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from timm.layers import trunc_normal_
from torch import nn

from examples.language import training
from examples.language.settings import InputError, Settings, key
from examples.language.training import Batch, Place, TextModel, order, part_of, read_lines
from nprf_vit.layers import KernelBlock, RelPosBias
from nprf_vit.layers.cached_attention import AttentionStep
from nprf_vit.ops.precision import without_autocast

END, UNKNOWN = '<eos>', '<unk>'  # of a line; for a rare word, by which WikiText replaces all with fewer than 3 uses
FILES = "WikiText's wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens"
# TRF as in random feature attention, whose queries and keys have length one; elu and softmax do not
VARIANTS = {
    'nprf_bias': {'kernel': 'prf', 'normalize': True, 'rel_pos': True},
    'nprf': {'kernel': 'prf', 'normalize': True, 'rel_pos': False},
    'trf': {'kernel': 'trf', 'normalize': True, 'rel_pos': False},
    'elu': {'kernel': 'elu', 'normalize': False, 'rel_pos': False},
    'softmax': {'kernel': 'softmax', 'normalize': False, 'rel_pos': False},
    'softmax_bias': {'kernel': 'softmax', 'normalize': False, 'rel_pos': True},
}


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """The paper's, unless changed."""

    variant: str = key('nprf_bias', f'one of {", ".join(VARIANTS)}')
    depth: int = key(6, 'layers')
    dim: int = key(512, 'width')
    num_heads: int = key(8, 'attention heads')
    mlp_dim: int = key(2048, 'width of the feed-forward layers')
    feature_dim: int = key(64, 'random features per head')
    dropout: float = key(0.1, 'of embedding, attention output and feed-forward', most=0.99)
    length: int = key(512, 'words per sequence')
    batch: int = key(64, 'sequences per update, over all processes')
    cutoffs: str = key('20000,60000', 'ranks of words at which the adaptive softmax changes to a smaller width')
    context: int = key(0, 'words before each evaluated block that are seen but not counted', free=True, least=0)
    prompt: str = key('The', 'words to go on from, for generate', free=True)
    words: int = key(60, 'words to generate', free=True)
    temperature: float = key(0.8, 'of the words that are drawn', free=True, least=0.01)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice('variant', VARIANTS)
        self.check_heads(self.dim, self.num_heads)
        ranks = self.numbers('cutoffs', int)
        if sorted({0, *ranks}) != [0, *ranks]:
            raise InputError(f'cutoffs {self.cutoffs}: expected ranks that increase, e.g. 20000,60000')
        if not 0 <= self.context < self.length:
            raise InputError(f'context {self.context}: expected 0 … {self.length - 1}, below length')


PAPER = LanguageSettings(steps=150_000, warmup_steps=6000, lr=2e-3, eval_interval=5000)
PRESETS = {
    'paper': PAPER,
    # minutes of one core, on text of some hundred thousand words
    'small': replace(
        PAPER, steps=500, warmup_steps=50, depth=2, dim=128, num_heads=4, mlp_dim=512, feature_dim=32, length=128,
        batch=16, cutoffs='1000,4000', eval_interval=0, threads=1,
    ),
}  # fmt: skip


class Vocabulary:
    """Words by falling frequency, as the adaptive softmax wants them; kept in vocabulary.txt of the output folder."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.index = {word: i for i, word in enumerate(words)}

    @classmethod
    def of(cls, settings: LanguageSettings) -> 'Vocabulary':
        """From the file of the output folder, or else counted in the training text."""
        kept = Path(settings.output) / 'vocabulary.txt'
        if kept.is_file():
            return cls(kept.read_text(encoding='utf-8').split('\n'))
        path = Path(settings.data_dir) / 'wiki.train.tokens'
        counts = Counter(word for line in words_of(path) for word in line)
        if UNKNOWN not in counts:
            raise InputError(f'{path} has no {UNKNOWN} in it, so it is not tokenized: expected {FILES}')
        words = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        kept.write_text('\n'.join(words), encoding='utf-8')
        return cls(words)

    def encode(self, path: Path) -> Iterator[list[int]]:
        """The words of a file as numbers, a list per line, each with its end."""
        for number, line in enumerate(words_of(path), 1):
            try:
                yield [self.index[word] for word in line]
            except KeyError as error:
                raise InputError(
                    f'{path}:{number}: the word {error} is not in the training text: expected {UNKNOWN} for such words'
                ) from None


def words_of(path: Path) -> Iterator[list[str]]:
    for line in read_lines(path, FILES):
        yield [*line.split(), END]


def encoded(settings: LanguageSettings, vocabulary: Vocabulary, split: str) -> np.ndarray:
    """A split as numbers, kept in the output folder: WikiText-103 takes a minute to count."""
    path = Path(settings.data_dir) / f'wiki.{split}.tokens'
    size = path.stat().st_size if path.is_file() else 0
    ids = training.keep_ids(Path(settings.output) / f'{split}-{size}.ids', lambda: vocabulary.encode(path))
    if split == 'train' and len(ids) <= settings.length:
        raise InputError(f'{path} has {len(ids)} words: expected more than one sequence of {settings.length}')
    return ids


class LanguageModel(TextModel):
    """Predicts each word from those before it in the sequence."""

    def __init__(self, settings: LanguageSettings, words: int) -> None:
        super().__init__()
        variant = VARIANTS[settings.variant]
        dim, heads = settings.dim, settings.num_heads
        self.length = settings.length
        self.embed = nn.Embedding(words, dim)
        self.pos_embed, self.rel_pos_bias = None, None
        if variant['rel_pos']:
            self.rel_pos_bias = RelPosBias((settings.length,), heads, dense=variant['kernel'] == 'softmax')
        else:
            self.pos_embed = nn.Parameter(torch.zeros(settings.length, dim))
        self.embed_drop = nn.Dropout(settings.dropout)
        attention = {name: variant[name] for name in ('kernel', 'normalize')}
        attention |= {'feature_dim': settings.feature_dim, 'causal': True, 'seed': settings.seed}
        self.blocks = nn.ModuleList(
            KernelBlock(dim, heads, settings.mlp_dim / dim, proj_drop=settings.dropout, depth=i, **attention)
            for i in range(settings.depth)
        )
        self.norm = nn.LayerNorm(dim)
        cutoffs = [rank for rank in settings.numbers('cutoffs', int) if rank < words]
        self.head = nn.AdaptiveLogSoftmaxWithLoss(dim, words, cutoffs or [words // 2], div_value=4.0)
        for module in (self.embed, *(m for m in self.blocks.modules() if isinstance(m, nn.Linear))):
            trunc_normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, words: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Words (B, length+1), -1 after the end, to the sum of -log p of words number first+1 and later, a scalar."""
        inputs, targets = words[:, :-1].clamp(min=0), words[:, 1:].clone()
        x = self.embed(inputs)  # B, N, C
        x = self.embed_drop(x if self.pos_embed is None else x + self.pos_embed)
        bias = None if self.rel_pos_bias is None else self.rel_pos_bias()
        for block in self.blocks:
            x = block(x, bias)
        targets[torch.arange(targets.shape[1], device=x.device) < first[:, None]] = -1
        counted = targets >= 0
        with without_autocast(x):  # differences of logits, which half precision would round to three digits
            return -self.head(self.norm(x).float()[counted], targets[counted]).output.sum()


class Decoder:
    """Log-probabilities of one word after another, from a cache of the words so far."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.position = model, 0
        table = None if model.rel_pos_bias is None else model.rel_pos_bias.table
        self.steps = [AttentionStep(block.attn, table, model.length) for block in model.blocks]

    @torch.inference_mode()
    def step(self, words: torch.Tensor) -> torch.Tensor:
        """The words (B,) at this position to log p (B, V) of the next."""
        model = self.model
        x = model.embed(words)  # B, C
        x = x if model.pos_embed is None else x + model.pos_embed[self.position]
        for block, attend in zip(model.blocks, self.steps):
            x = x + attend(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        self.position += 1
        return model.head.log_prob(model.norm(x))


class LanguageTask:
    """WikiText in blocks of equal length, in another order in each epoch."""

    def __init__(self, settings: LanguageSettings, place: Place) -> None:
        self.settings = settings
        self.vocabulary = place.from_main(lambda: Vocabulary.of(settings))
        splits = ('train', 'valid', 'test')
        place.from_main(lambda: [len(encoded(settings, self.vocabulary, split)) for split in splits])
        self.data = {split: encoded(settings, self.vocabulary, split) for split in splits}
        self.model = LanguageModel(settings, len(self.vocabulary.words))

    def share(self, step: int, part: int, parts: int) -> tuple[Batch, int]:
        length, batch, words = self.settings.length, self.settings.batch, self.data['train']
        blocks = part_of(order(self.settings.seed, (len(words) - 1) // length, step * batch, batch), part, parts)
        rows = np.empty((len(blocks), length + 1), dtype=np.int64)
        for row, i in zip(rows, blocks):
            row[:] = words[i * length : (i + 1) * length + 1]
        return (torch.from_numpy(rows), torch.zeros(len(blocks), dtype=torch.long)), len(blocks) * length

    def evaluate(self, split: str, place: Place) -> dict[str, float]:
        """Perplexity per word, ends of lines included: e to the mean of -log p."""
        length, context = self.settings.length, self.settings.context
        words, device = self.data[split], place.device
        starts = [0, *range(length - context, len(words) - 1 - context, length - context)]
        total = torch.zeros(2, device=device, dtype=torch.float32 if device.type == 'mps' else torch.float64)
        own = starts[place.rank :: place.world]
        for chosen in np.array_split(own, math.ceil(len(own) / 16) or 1):
            rows = np.full((len(chosen), length + 1), -1)
            for row, start in zip(rows, chosen):
                part = words[start : start + length + 1]
                row[: len(part)] = part
            first = torch.tensor([0 if start == 0 else context for start in chosen], device=device)
            batch = torch.from_numpy(rows).to(device)
            if len(chosen):
                counted = (batch[:, 1:] >= 0).sum() - first.sum()
                total += torch.stack([self.model(batch, first).to(total.dtype), counted.to(total.dtype)])
        loss, count = place.sum(total).tolist()
        return {'loss': loss / count, 'perplexity': math.exp(loss / count), 'words': count}


def generate(settings: LanguageSettings, place: Place, *_: object) -> str:
    """Words after the prompt, drawn one by one."""
    settings, weights = training.of_checkpoint(settings)
    vocabulary = Vocabulary.of(settings)
    model = LanguageModel(settings, len(vocabulary.words)).to(place.device).eval()
    model.load_state_dict(weights)
    text = [END, *settings.prompt.split()][-settings.length :]
    unknown = [word for word in text if word not in vocabulary.index]
    if unknown:
        raise InputError(f'the prompt has words that the model does not know: {" ".join(unknown)}')
    decoder, generator = Decoder(model), torch.Generator().manual_seed(settings.seed)
    for word in text[:-1]:
        decoder.step(torch.tensor([vocabulary.index[word]], device=place.device))
    for _ in range(min(settings.words, settings.length - decoder.position)):
        logits = (
            decoder.step(torch.tensor([vocabulary.index[text[-1]]], device=place.device))[0].cpu()
            / settings.temperature
        )
        logits = logits.masked_fill(torch.arange(len(logits)) == vocabulary.index[UNKNOWN], -math.inf)
        choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        text.append(vocabulary.words[int(choice)])
    written = ' '.join(text[1:]).replace(f' {END}', '\n')
    if place.is_main:
        print(written)
    return written


def train(settings: LanguageSettings, place: Place, *more: object) -> dict[str, float] | None:
    return training.train_task(LanguageTask, settings, place, *more)


if __name__ == '__main__':
    sys.exit(training.run(__doc__, PRESETS, {'train': train, 'generate': generate}))
