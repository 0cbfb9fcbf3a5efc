"""The paper's language tasks at small scale, on real text out of Debian packages (examples/language/prepare_text.py).

python -m experiments.language language_model --text DIR           perplexity, three seeds
python -m experiments.language masked_language_model --text DIR    accuracy on masked tokens
python -m experiments.language translation --text DIR              BLEU of the paper's four rows

One thread and one process; minutes per run. Rows go to OUTPUT/NAME.csv as runs finish (default: output/language). What
the file has is not run again; the rows of the documents are in docs/results.
"""

import argparse
import dataclasses
import importlib
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report as results
from benchmarks.report import markdown
from experiments.runs import Table, with_spread
from nprf_vit.engine.checkpoint.file import checkpoints
from nprf_vit.engine.distributed.process_group import process_group

FAST = 30.0  # as in the image experiments (`rel_pos_lr_scale`)


@dataclass(frozen=True)
class Experiment:
    """An example, the text it learns from, and what is compared."""

    text: str  # folder of prepare_text.py
    # name: what it is called in the table, what differs from 'small' (None: nothing is trained)
    variants: dict[str, tuple[str, dict[str, Any] | None]]
    metrics: dict[str, str]  # column of the file: what it is called in the table
    seeds: int
    digits: int = 1


def fast(**more: Any) -> dict[str, Any]:
    return {**more, 'rel_pos_lr_scale': FAST}


EXPERIMENTS = {
    'language_model': Experiment(
        'novels',
        {
            'nprf_bias': ('NPRF with bias', {'variant': 'nprf_bias'}),
            'nprf_bias_fast': ('NPRF with bias ×30', fast(variant='nprf_bias')),
            'trf': ('TRF', {'variant': 'trf'}),
            'elu': ('linear elu', {'variant': 'elu'}),
            'softmax': ('softmax', {'variant': 'softmax'}),
            'softmax_bias_fast': ('softmax with bias ×30', fast(variant='softmax_bias')),
        },
        {'test_perplexity': 'test perplexity', 'valid_perplexity': 'validation perplexity'},
        seeds=3,
    ),
    'translation': Experiment(
        'messages',
        {
            'standard': ('standard', {'variant': 'standard'}),
            'standard_prf': ('standard encoder, PRF decoder', {'variant': 'standard_prf'}),
            'prf': ('PRF', {'variant': 'prf'}),
            'nprf_bias': ('NPRF with bias', {'variant': 'nprf_bias'}),
            'nprf_bias_fast': ('NPRF with bias ×30', fast(variant='nprf_bias')),
        },
        {'test_bleu': 'test BLEU', 'test_loss': 'test -log p per token'},
        seeds=1,
        digits=2,
    ),
    'masked_language_model': Experiment(
        'novels',
        {
            'nprf_bias': ('NPRF with bias', {'variant': 'nprf_bias'}),
            'nprf_bias_fast': ('NPRF with bias ×30', fast(variant='nprf_bias')),
            'softmax': ('softmax', {'variant': 'softmax'}),
            'softmax_bias_fast': ('softmax with bias ×30', fast(variant='softmax_bias')),
            'no_context': ('the best without a look at other tokens', None),
        },
        {
            'test_accuracy': 'accuracy on masked tokens, test',
            'valid_accuracy': 'validation',
            'test_loss': 'test -log p per token',
        },
        seeds=2,
        digits=2,
    ),
}


def run_one(name: str, changes: dict[str, Any], trained: bool, seed: int, text: Path, work: Path) -> dict[str, float]:
    """Train and measure one model; a run in the work folder is continued."""
    example = importlib.import_module(f'examples.language.{name}')
    place = {'seed': seed, 'data_dir': str(text), 'output': str(work), 'device': 'cpu', 'threads': 1}
    settings = dataclasses.replace(example.PRESETS['small'], **{**changes, **place})
    with process_group('cpu', threads=1) as alone:
        if not trained:
            work.mkdir(parents=True, exist_ok=True)
            return no_context(example.MaskedTask(settings, alone), example.MASK)
        return example.train(settings, alone, bool(checkpoints(work)))


def no_context(task: Any, mask: int) -> dict[str, float]:
    """What can be known of a masked token without its neighbours: how frequent each is, and what stands there.

    Half of the chosen tokens that are not masks are kept as they were, the other half are drawn from all.
    """
    counts = np.bincount(np.asarray(task.data['train']).ravel(), minlength=task.settings.vocabulary) + 1.0
    frequency, found = counts / counts.sum(), {}
    for split in ('valid', 'test'):
        (inputs, targets), _ = task.batch_of(split, np.arange(len(task.data[split])), 'evaluation')
        seen, truth = (tokens[targets >= 0].numpy() for tokens in (inputs, targets))
        hidden = seen == mask
        right = np.where(hidden, truth == counts.argmax(), truth == seen)
        p = np.where(hidden, frequency[truth], 0.5 * (truth == seen) + 0.5 * frequency[truth])
        values = {'loss': -np.log(p).mean(), 'accuracy': 100 * right.mean(), 'tokens': len(truth)}
        found |= {f'{split}_{name}': float(value) for name, value in values.items()}
    return found


def fill(name: str, text: Path, output: Path, work: Path, seeds: int | None, quick: dict[str, Any]) -> Table:
    """Add the rows that the table lacks: one seed of every variant before the second of any."""
    experiment = EXPERIMENTS[name]
    table = Table(output / f'{name}.csv', ('variant', 'seed'))
    for seed in range(seeds or experiment.seeds):
        for variant, (_, changes) in experiment.variants.items():
            if table.has(variant=variant, seed=seed) or (changes is None and seed):
                continue
            begin, folder = time.process_time(), work / f'{name}-{variant}-{seed}'
            settings = {**(changes or {}), **quick}
            found = run_one(name, settings, changes is not None, seed, text / experiment.text, folder)
            measured = {column: f'{value:.6g}' for column, value in found.items()}
            minutes = f'{(time.process_time() - begin) / 60:.2f}'
            table.add({'variant': variant, 'seed': seed, **measured, 'cpu_minutes': minutes})
            shutil.rmtree(folder)
    return table


def report(name: str, table: Table) -> list[dict[str, Any]]:
    """Mean ± deviation between seeds."""
    rows = []
    for variant, (label, _) in EXPERIMENTS[name].variants.items():
        runs = table.values('seed', variant=variant)
        if runs:
            cells = {
                head: with_spread(table.values(column, variant=variant), EXPERIMENTS[name].digits)
                for column, head in EXPERIMENTS[name].metrics.items()
            }
            rows.append({'model': label, **cells, 'runs': len(runs)})
    return rows


def shipped_table(name: str) -> Callable[[], list[dict[str, Any]]]:
    return lambda: report(name, Table(results.RESULTS / f'{name}.csv', ()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', choices=tuple(EXPERIMENTS))
    parser.add_argument('--text', type=Path, required=True, help='folder that prepare_text.py wrote')
    parser.add_argument('--output', type=Path, default=Path('output/language'), help='folder of the tables')
    parser.add_argument('--work', type=Path, default=Path('output/language/runs'), help='folder of unfinished runs')
    parser.add_argument('--seeds', type=int, help='how many, if not as many as in the documents')
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = fill(args.name, args.text, args.output, args.work, args.seeds, {})
    print(markdown(report(args.name, table)))
    return 0


if __name__ == '__main__':
    sys.exit(main())
