r"""Translation on IWSLT14: an encoder-decoder with kernelized attention, joint BPE, beam search, BLEU.

The paper's table (de-en, BLEU): softmax ("standard") 36.0, standard encoder with PRF decoder 36.2, PRF in both 34.0,
NPRF with bias in both 36.0. Not run here.

  torchrun --nproc-per-node 8 -m examples.language.translation train --data-dir iwslt14.tokenized.de-en/tmp \
      --output output/iwslt
  ... --variant standard, standard_prf, prf or nprf_bias (the default): the four rows
  ... --source en --target de, and --source fr --target en on the files of that pair, for the other directions
  python -m examples.language.translation translate --data-dir ... --output output/iwslt --input sentences.de

DATA_DIR has train.de, train.en, valid.de, valid.en, test.de, test.en: a sentence per line, line i of both files belongs
together. fairseq's prepare-iwslt14.sh leaves such files in its folder tmp: Moses tokens in lower case, before its own
BPE. On these BLEU takes the tokens as they are (`--bleu-tokenize none`, the default); `13a` is for ordinary text.
The paper's: 6+6 layers, width 512, 4 heads, 16 features in the encoder and 24 in the decoder, label smoothing 0.1,
dropout 0.3, 8192 tokens per batch, 50,000 steps with 4000 of warm-up, peak 5e-4, joint BPE of 10,000, beam 5, length
penalty 1.2. Our choices: feed-forward 1024, Adam (0.9, 0.98), weight decay 1e-4, pre-norm blocks, one embedding for
both languages and the output, learned absolute positions where there is no bias; between decoder and encoder the
decoder's kernel, without a bias; the weights of the last step.

Measured here: `--preset small` on other real text; docs/language.md has the commands, docs/results.md the numbers.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sacrebleu
import sentencepiece
import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import nn

from examples.language import training
from examples.language.settings import InputError, Settings, key
from examples.language.training import Batch, Place, TextModel, order, read_lines
from nprf_vit import KernelAttention, RelPosBias
from nprf_vit.layers import KernelBlock
from nprf_vit.ops.precision import without_autocast

PAD, UNKNOWN, BEGIN, END = range(4)  # numbers of the special tokens
_SOFTMAX = {'kernel': 'softmax', 'normalize': False, 'rel_pos': False}
_PRF = {'kernel': 'prf', 'normalize': False, 'rel_pos': False}
_NPRF = {'kernel': 'prf', 'normalize': True, 'rel_pos': True}
VARIANTS = {  # encoder, decoder
    'nprf_bias': (_NPRF, _NPRF),
    'standard': (_SOFTMAX, _SOFTMAX),
    'standard_prf': (_SOFTMAX, _PRF),
    'prf': (_PRF, _PRF),
}


@dataclass(frozen=True)
class TranslationSettings(Settings):
    """The paper's, unless changed."""

    source: str = key('de', 'language to translate from: the ending of its files')
    target: str = key('en', 'language to translate to')
    variant: str = key('nprf_bias', f'one of {", ".join(VARIANTS)}')
    depth: int = key(6, 'layers of the encoder, and of the decoder')
    dim: int = key(512, 'width')
    num_heads: int = key(4, 'attention heads')
    mlp_dim: int = key(1024, 'width of the feed-forward layers')
    encoder_features: int = key(16, 'random features per head of the encoder')
    decoder_features: int = key(24, 'random features per head of the decoder')
    dropout: float = key(0.3, 'of embedding, attention output and feed-forward', most=0.99)
    smoothing: float = key(0.1, 'label smoothing', most=0.99)
    vocabulary: int = key(10_000, 'tokens of the joint BPE')
    length: int = key(256, 'tokens at most; longer pairs are not trained on, longer sentences are cut')
    tokens: int = key(8192, 'tokens per update over all processes, padding included, of the longer side')
    beam: int = key(5, 'width of the beam', free=True)
    length_penalty: float = key(1.2, "exponent of the length by which a translation's log p is divided", free=True)
    bleu_tokenize: str = key('none', "sacrebleu's tokenizer: none for files that are tokenized, or 13a", free=True)
    input: str = key('', 'file of sentences, for translate', free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice('variant', VARIANTS)
        self.check_heads(self.dim, self.num_heads)
        self.check_choice('bleu_tokenize', ('none', '13a', 'intl'))
        if self.source == self.target:
            raise InputError(f'source and target are both {self.source}: expected two languages')


PAPER = TranslationSettings(steps=50_000, warmup_steps=4000, lr=5e-4, weight_decay=1e-4, eval_interval=5000)
PRESETS = {
    'paper': PAPER,
    # minutes of one core, on some ten thousand short sentences
    'small': replace(
        PAPER, steps=1500, warmup_steps=150, lr=2e-3, depth=2, dim=128, mlp_dim=256, dropout=0.1, vocabulary=3000,
        length=64, tokens=1024, bleu_tokenize='13a', eval_interval=0, threads=1,
    ),
}  # fmt: skip


def read_pairs(settings: TranslationSettings, split: str) -> tuple[list[str], list[str]]:
    """Sentences of a split in both languages."""
    paths = [Path(settings.data_dir) / f'{split}.{language}' for language in (settings.source, settings.target)]
    sides = [list(read_lines(path, 'a sentence per line')) for path in paths]
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f'{paths[0]} has {len(sides[0])} lines and {paths[1]} {len(sides[1])}: expected translations line by line'
        )
    return sides[0], sides[1]


def tokenizer_of(settings: TranslationSettings) -> sentencepiece.SentencePieceProcessor:
    """Byte-pair encoding of the training sentences of both languages together, kept in the output folder."""
    kept = Path(settings.output) / 'tokens.model'
    if not kept.is_file():
        lines = [line for side in read_pairs(settings, 'train') for line in side if line.strip()]
        ids = {'pad_id': PAD, 'unk_id': UNKNOWN, 'bos_id': BEGIN, 'eos_id': END}
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_prefix=str(kept.with_suffix('')), model_type='bpe',
                vocab_size=settings.vocabulary, character_coverage=1.0, minloglevel=2, **ids,
            )  # fmt: skip
        except RuntimeError as error:  # sentencepiece's word for a text that is too short
            raise InputError(
                f'{settings.data_dir} gives no vocabulary of {settings.vocabulary}: {str(error)[-120:]}'
            ) from None
    return sentencepiece.SentencePieceProcessor(model_file=str(kept))


class DecoderBlock(KernelBlock):
    """A block whose attention is causal, and after it attention to the encoder's output."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, proj_drop: float, **attention: Any) -> None:
        super().__init__(dim, num_heads, mlp_ratio, proj_drop=proj_drop, causal=True, **attention)
        self.cross_norm = nn.LayerNorm(dim)
        depth = attention.pop('depth') + 1000  # other projections than those of the block's own attention
        self.cross_attn = KernelAttention(dim, num_heads, proj_drop=proj_drop, depth=depth, **attention)

    def forward(self, x: torch.Tensor, bias: Any, context: torch.Tensor, context_mask: torch.Tensor) -> torch.Tensor:
        """x (B, N, C), context (B, M, C) of which the mask (B, M) says what is no padding, to (B, N, C)."""
        x = x + self.attn(self.norm1(x), bias)
        x = x + self.cross_attn(self.cross_norm(x), context=context, key_mask=context_mask)
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Blocks, and what tells them of positions: a relative bias that they share, or an absolute embedding."""

    def __init__(self, settings: TranslationSettings, block: type[nn.Module], variant: dict[str, Any], m: int) -> None:
        super().__init__()
        dim, heads, self.length = settings.dim, settings.num_heads, settings.length
        self.pos_embed, self.rel_pos_bias = None, None
        if variant['rel_pos']:  # 'clip': a shorter sequence takes the middle of the table, not a compressed one
            self.rel_pos_bias = RelPosBias((settings.length,), heads, variant['kernel'] == 'softmax', extend='clip')
        else:
            self.pos_embed = nn.Parameter(torch.zeros(settings.length, dim))
            trunc_normal_(self.pos_embed, std=0.02)
        self.drop, self.norm = nn.Dropout(settings.dropout), nn.LayerNorm(dim)
        options = {'kernel': variant['kernel'], 'normalize': variant['normalize'], 'feature_dim': m}
        self.blocks = nn.ModuleList(
            block(
                dim, heads, settings.mlp_dim / dim, proj_drop=settings.dropout, depth=i, seed=settings.seed, **options
            )
            for i in range(settings.depth)
        )

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """x (B, N, C) and what each block gets besides."""
        n = x.shape[1]
        x = self.drop(x if self.pos_embed is None else x + self.pos_embed[:n])
        bias = None if self.rel_pos_bias is None else self.rel_pos_bias((n,))
        for block in self.blocks:
            x = block(x, bias, *more)
        return self.norm(x)


class Translator(TextModel):
    """Encoder and decoder over one vocabulary."""

    def __init__(self, settings: TranslationSettings) -> None:
        super().__init__()
        self.smoothing, self.scale, self.length = settings.smoothing, settings.dim**0.5, settings.length
        self.embed = nn.Embedding(settings.vocabulary, settings.dim, padding_idx=PAD)
        encoder, decoder = VARIANTS[settings.variant]
        self.encoder = Stack(settings, KernelBlock, encoder, settings.encoder_features)
        self.decoder = Stack(settings, DecoderBlock, decoder, settings.decoder_features)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        trunc_normal_(self.embed.weight, std=settings.dim**-0.5)

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embed(source) * self.scale, source != PAD)

    def decode(
        self, target: torch.Tensor, context: torch.Tensor, context_mask: torch.Tensor, first: int = 0
    ) -> torch.Tensor:
        """Logits (B, N-first, V) of the token after each of the target's (B, N), from the one numbered `first` on."""
        x = self.decoder(self.embed(target) * self.scale, context, context_mask)[:, first:]
        with without_autocast(x):
            return x.float() @ self.embed.weight.float().T

    def forward(self, source: torch.Tensor, target: torch.Tensor, smoothing: float | None = None) -> torch.Tensor:
        """Tokens (B, N) and (B, M), the latter from BEGIN to END, to the sum of the losses of the target's tokens."""
        logits = self.decode(target[:, :-1], self.encode(source), source != PAD)
        smoothing = self.smoothing if smoothing is None else smoothing
        options = {'ignore_index': PAD, 'reduction': 'sum', 'label_smoothing': smoothing}
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), **options)

    @torch.inference_mode()
    def translate(self, source: torch.Tensor, beam: int, length_penalty: float) -> list[list[int]]:
        """The best translation of each sentence (B, N) by beam search.

        The prefix is computed anew for every token: sentences are short, and states need not follow their beams.
        """
        context, mask = self.encode(source).repeat_interleave(beam, 0), (source != PAD).repeat_interleave(beam, 0)
        prefixes = torch.full((len(mask), 1), BEGIN, device=source.device)
        scores = torch.full((len(source), beam), -torch.inf, device=source.device)
        scores[:, 0] = 0.0  # all beams are alike at first
        done: list[list[tuple[float, list[int]]]] = [[] for _ in source]
        active = list(range(len(source)))  # sentences that are not done
        for t in range(min(self.length, 2 * source.shape[1] + 10) - 1):
            logs = self.decode(prefixes, context, mask, first=t)[:, 0].log_softmax(-1)  # active·beam, V
            logs[:, [PAD, BEGIN, UNKNOWN]] = -torch.inf
            total = scores[..., None] + logs.unflatten(0, scores.shape)  # active, beam, V
            best, which = total.flatten(1).topk(2 * beam)  # enough that `beam` of them do not end
            ends = [done[i] for i in active]
            prefixes, scores = choose_beams(prefixes, best, which, logs.shape[1], length_penalty, ends)
            left = [k for k, found in enumerate(ends) if len(found) < beam]
            if len(left) < len(active):
                rows = [k * beam + b for k in left for b in range(beam)]
                active, scores = [active[k] for k in left], scores[left]
                prefixes, context, mask = prefixes[rows], context[rows], mask[rows]
            if not active:
                break
        for k, i in enumerate(active):  # what has not ended counts as it is, if nothing has
            if not done[i]:
                row = k * beam + int(scores[k].argmax())
                done[i].append((0.0, prefixes[row].tolist()))
        return [max(found)[1][1:] for found in done]


def choose_beams(
    prefixes: torch.Tensor,
    best: torch.Tensor,
    which: torch.Tensor,
    words: int,
    length_penalty: float,
    done: list[list[tuple[float, list[int]]]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The beams to go on with, and their scores; candidates that end, if among the first `beam`, go to `done`.

    Args:
        prefixes: (sentences·beam, t) tokens so far.
        best, which: (sentences, 2·beam) log p of the best candidates, and where they are among beam·words.
    """
    beam = best.shape[1] // 2
    parents: list[int] = []
    tokens: list[int] = []
    kept: list[list[float]] = []
    for i, (values, places) in enumerate(zip(best.tolist(), which.tolist())):
        going = []
        for rank, (value, place) in enumerate(zip(values, places)):
            parent, token = i * beam + place // words, place % words
            if token != END:
                going.append((parent, token, value))
            elif rank < beam and len(done[i]) < beam and value > -math.inf:
                text = prefixes[parent].tolist()
                done[i].append((value / len(text) ** length_penalty, text))
        parents += [parent for parent, _, _ in going[:beam]]
        tokens += [token for _, token, _ in going[:beam]]
        kept.append([value for _, _, value in going[:beam]])
    added = torch.tensor(tokens, device=prefixes.device)[:, None]
    return torch.cat([prefixes[parents], added], 1), torch.tensor(kept, device=prefixes.device)


def padded(rows: Sequence[list[int]]) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


class TranslationTask:
    """Pairs of sentences, in batches of similar length."""

    def __init__(self, settings: TranslationSettings, place: Place) -> None:
        self.settings = settings
        place.from_main(lambda: tokenizer_of(settings) and None)  # one process trains it
        self.tokenizer = tokenizer_of(settings)
        self.text = {split: read_pairs(settings, split) for split in ('train', 'valid', 'test')}
        self.data = {split: self.encode_pairs(*sides) for split, sides in self.text.items()}
        self.batches = self.make_batches()
        self.model = Translator(settings)

    def encode_pairs(self, sources: list[str], targets: list[str]) -> list[tuple[list[int], list[int]]]:
        longest = self.settings.length
        left = [[*ids[: longest - 1], END] for ids in self.tokenizer.encode(sources)]
        right = [[BEGIN, *ids, END] for ids in self.tokenizer.encode(targets)]
        return list(zip(left, right))

    def make_batches(self) -> list[list[int]]:
        """Indices of training pairs, sorted by length and cut where the padded tokens of the longer side are enough."""
        pairs, s = self.data['train'], self.settings
        fitting = [i for i, pair in enumerate(pairs) if min(map(len, pair)) > 1 and max(map(len, pair)) <= s.length]
        batches: list[list[int]] = [[]]
        for i in sorted(fitting, key=lambda i: (max(map(len, pairs[i])), i)):
            if (len(batches[-1]) + 1) * max(map(len, pairs[i])) > s.tokens and batches[-1]:
                batches.append([])
            batches[-1].append(i)
        if not batches[0]:
            raise InputError(f'{s.data_dir} has no training pair of 1 … {s.length} tokens a side')
        return batches

    def share(self, step: int, part: int, parts: int) -> tuple[Batch, int]:
        """Every parts-th pair of a batch; a process for which there is none takes a pair that does not count."""
        (chosen,) = order(self.settings.seed, len(self.batches), step, 1)
        pairs = [self.data['train'][i] for i in self.batches[chosen]]
        rows = pairs[part::parts] or [(pairs[0][0], [BEGIN, PAD])]
        target = padded([right for _, right in rows])
        return (padded([left for left, _ in rows]), target), int((target[:, 1:] != PAD).sum())

    def evaluate(self, split: str, place: Place) -> dict[str, float]:
        """-log p per token, without smoothing; on test BLEU as well."""
        own = sorted(self.data[split][place.rank :: place.world], key=lambda pair: len(pair[1]))
        own = [(left, right[: self.settings.length]) for left, right in own]
        total = torch.zeros(2, device=place.device)
        for first in range(0, len(own), 32):
            left, right = (padded(rows).to(place.device) for rows in zip(*own[first : first + 32]))
            total += torch.stack([self.model(left, right, 0.0), (right[:, 1:] != PAD).sum().float()])
        loss, count = place.sum(total).tolist()
        if split != 'test':
            return {'loss': loss / count}
        said = translate_all(self.model, self.tokenizer, self.text[split][0], self.settings, place)
        bleu = sacrebleu.corpus_bleu(said, [self.text[split][1]], tokenize=self.settings.bleu_tokenize)
        return {'loss': loss / count, 'bleu': bleu.score}


def translate_all(
    model: Translator, tokenizer: Any, lines: list[str], settings: TranslationSettings, place: Place
) -> list[str]:
    """Translations of all lines, each process doing its part, on all of them."""
    ids = [[*line[: settings.length - 1], END] for line in tokenizer.encode(lines)]
    own, said = sorted(range(place.rank, len(ids), place.world), key=lambda i: len(ids[i])), {}
    for first in range(0, len(own), 32):
        chosen = own[first : first + 32]
        found = model.translate(
            padded([ids[i] for i in chosen]).to(place.device), settings.beam, settings.length_penalty
        )
        said |= dict(zip(chosen, tokenizer.decode(found)))
    everything = {i: text for part in place.gather(said) for i, text in part.items()}
    return [everything[i] for i in range(len(lines))]


def translate(settings: TranslationSettings, place: Place, *_: object) -> list[str]:
    settings, weights = training.of_checkpoint(settings)
    model = Translator(settings).to(place.device).eval()
    model.load_state_dict(weights)
    if not settings.input:
        raise InputError('--input is missing')
    lines = list(read_lines(Path(settings.input), 'a sentence per line'))
    said = translate_all(model, tokenizer_of(settings), lines, settings, place)
    if place.is_main:
        print('\n'.join(said))
    return said


def train(settings: TranslationSettings, place: Place, *more: object) -> dict[str, float] | None:
    return training.train_task(TranslationTask, settings, place, *more)


if __name__ == '__main__':
    sys.exit(training.run(__doc__, PRESETS, {'train': train, 'translate': translate}))
