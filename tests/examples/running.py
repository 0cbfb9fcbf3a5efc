"""Tiny files in the real formats, and short runs of the language examples on them."""

import contextlib
import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from nprf_vit.engine.checkpoint.file import read_checkpoint

from ..engine.running import ONE, ROOT

WORDS = ['the', 'a', 'king', 'queen', 'war', 'ship', 'of', 'in', 'was', 'took', 'old', '<unk>', ',', '.', '@-@']
GERMAN = {'the': 'der', 'old': 'alte', 'small': 'kleine', 'king': 'König', 'queen': 'Königin', 'ship': 'Schiff'}
TINY = {
    'steps': 10, 'warmup_steps': 2, 'lr': 1e-2, 'depth': 1, 'dim': 16, 'num_heads': 2, 'mlp_dim': 32, 'dropout': 0.1,
    'save_interval': 5, 'log_interval': 5, 'device': 'cpu', 'eval_interval': 0,
}  # fmt: skip


def wikitext(folder: Path) -> Path:
    """wiki.*.tokens as they are distributed: a blank at both ends of a line, headings, empty lines."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split, articles in (('train', 12), ('valid', 3), ('test', 3)):
        text = ''
        for _ in range(articles):
            text += f' \n = {rng.choice(WORDS)} {rng.choice(WORDS)} = \n \n'
            text += ''.join(f' {" ".join(rng.choices(WORDS, k=20))} . \n' for _ in range(4))
        (folder / f'wiki.{split}.tokens').write_text(text, encoding='utf-8')
    return folder


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    nouns, adjectives, verbs = ('king', 'queen', 'ship'), ('old', 'small'), ('saw', 'took')
    chosen = [(rng.choice(adjectives), rng.choice(nouns), rng.choice(verbs), rng.choice(nouns)) for _ in range(count)]
    return [f'the {adjective} {noun} {verb} the {other} .' for adjective, noun, verb, other in chosen]


def pairs(folder: Path) -> Path:
    """IWSLT14 as prepared: a sentence per line and language."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate((('train', 120), ('valid', 10), ('test', 10))):
        english = sentences(count, seed)
        german = [' '.join(GERMAN.get(word, word) for word in line.split()) for line in english]
        (folder / f'{split}.en').write_text('\n'.join(english) + '\n', encoding='utf-8')
        (folder / f'{split}.de').write_text('\n'.join(german) + '\n', encoding='utf-8')
    return folder


def documents(folder: Path) -> Path:
    """Text for masked pre-training: a sentence per line, an empty line between documents."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate((('train', 160), ('valid', 20))):
        lines = sentences(count, seed)
        lines[::10] = [''] * len(lines[::10])
        (folder / f'{split}.txt').write_text('\n'.join(lines) + '\n', encoding='utf-8')
    return folder


def settings_of(example: Any, data: Path, output: Path, **changes: Any) -> Any:
    """The small preset, made tiny."""
    return dataclasses.replace(
        example.PRESETS['small'], **{'data_dir': str(data), 'output': str(output), **TINY, **changes}
    )


def straight_and_resumed(example: Any, data: Path, tmp_path: Path, **changes: Any) -> list[dict[str, torch.Tensor]]:
    """The weights after ten steps in one go, and after five and five more."""
    whole = settings_of(example, data, tmp_path / 'whole', **changes)
    results = [example.train(whole, ONE)]
    parts = settings_of(example, data, tmp_path / 'parts', **changes)
    assert example.train(parts, ONE, False, lambda step: step == 5) is None
    assert read_checkpoint(tmp_path / 'parts' / 'last.pt')['step'] == 5
    results.append(example.train(parts, ONE, True))
    assert results[0] == results[1]
    return [read_checkpoint(tmp_path / name / 'last.pt')['state_dict'] for name in ('whole', 'parts')]


def command(name: str, *words: object, processes: int = 1, code: int = 0) -> str:
    """What an example prints when it is started as a command, under torchrun if there are several processes."""
    start = [sys.executable, '-m']
    if processes > 1:
        start += ['torch.distributed.run', '--standalone', '--nproc-per-node', str(processes), '-m']
    done = subprocess.run(
        [*start, f'examples.language.{name}', *map(str, words)],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def printed(said: str, words: str) -> float:
    """The number after these words in what a command printed."""
    return float(said.split(f'{words} ')[1].split()[0].rstrip(','))


def options(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in ('--' + name.replace('_', '-'), str(value))]


@contextlib.contextmanager
def changed(path: Path, content: bytes | None):
    """A file with another content, or without the file, for a while."""
    before = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)
