"""What people import: names and signatures stay, importing changes nothing.

A name or an argument is added by `python -m tests.test_public_api > tests/public_api.txt`. One
that goes or changes breaks programs of other people: CHANGELOG.md has to say so.
"""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nprf_vit
from nprf_vit import layers, ops
from nprf_vit.ops.scratch import keep_freed_pages

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).with_name('public_api.txt')

# timm, torchvision and torch cost what they cost; what counts is what this package adds to a process that has them
IMPORTING = """
import random, re, resource, signal, sys, threading, warnings
import numpy, timm, torch, torchvision


def process():
    peak = int(re.search(r'VmPeak:\\s*(\\d+)', open('/proc/self/status').read())[1]) / 1024
    return peak, {
        'dtype': torch.get_default_dtype(),
        'device': torch.get_default_device(),
        'threads': (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        'random': (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
        'matmul': (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark),
        'deterministic': torch.are_deterministic_algorithms_enabled(),
        'grad': torch.is_grad_enabled(),
        'signals': [signal.getsignal(s) for s in signal.valid_signals()],
        'filters': list(warnings.filters),
        'recursion': sys.getrecursionlimit(),
        'limits': [resource.getrlimit(x) for x in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)],
    }


peak, before = process()
import nprf_vit
grown, after = process()
print([name for name in before if before[name] != after[name]], round(grown - peak), sep=';')
"""


def signature(function) -> str:
    """Names, kinds and defaults of the arguments; annotations may change without breaking a caller."""
    arguments = inspect.signature(function)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in arguments.parameters.values()]
    shown = str(arguments.replace(parameters=bare, return_annotation=arguments.empty))
    return re.sub(r"<class '[\w.]*?(\w+)'>", r'\1', shown)


def public_api() -> list[str]:
    lines = []
    for module in (nprf_vit, ops, layers):
        for name in sorted(module.__all__):
            value, full = getattr(module, name), f'{module.__name__}.{name}'
            lines.append(full + (signature(value) if callable(value) else f': {type(value).__name__}'))
            if isinstance(value, type) and module is not nprf_vit:
                methods = {n: m for n, m in vars(value).items() if not n.startswith('_') and inspect.isfunction(m)}
                lines += [f'{full}.{n}{signature(m)}' for n, m in sorted(methods.items())]
    return lines


def test_names_and_signatures_are_frozen():
    assert public_api() == FROZEN.read_text(encoding='utf-8').splitlines()


def test_a_renamed_argument_is_noticed():
    def convert(model, kernel='prf', features=32, seed=0): ...

    assert f'nprf_vit.convert{signature(convert)}' not in public_api()
    assert f'nprf_vit.convert{signature(convert).replace("features", "feature_dim")}' in public_api()


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_importing_changes_nothing():
    done = subprocess.run([sys.executable, '-c', IMPORTING], cwd=ROOT, capture_output=True, text=True, check=True)
    changed, megabytes = done.stdout.split(';')
    assert changed == '[]' and not done.stderr
    assert int(megabytes) < 16  # 2 measured: the package's own code


def test_the_allocator_is_prepared_once_by_the_first_call():
    keep_freed_pages.cache_clear()
    ones = torch.ones(1, 1, 4, 2)
    for _ in range(3):
        nprf_vit.kernel_attention(ones, ones, ones)
    assert keep_freed_pages.cache_info().misses == 1


if __name__ == '__main__':
    print('\n'.join(public_api()))
