"""Runs the Python of one page as a reader would: block after block, in one process and one namespace."""

import os
import re
import runpy
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from .markdown import ROOT, Block

# Processes are forked from one that has imported these and computed nothing: torch takes seconds to import, and its
# threads would not survive a fork of the process that runs the tests.
SERVER = get_context('forkserver')
SERVER.set_forkserver_preload(['torch', 'timm', 'torchvision', 'nprf_vit'])

# Models that documents speak of and that take a core many seconds: as deep and as many heads, but narrow. Whoever asks
# for a width gets it, and the slow test has all of them at full size.
NARROW = {
    r'.*(deit|vit|beit\w*|relpos)_(small|base|large)\w*': {'embed_dim': 96, 'num_heads': 12},
    r'\w+_pixel_imagenet32': {'embed_dim': 64, 'depth': 2},
}


def run_page(page: Path, blocks: list[Block], narrow: bool = True, seconds: float = 600) -> str:
    """Run the blocks in an empty folder, in a process of their own; returns the traceback, or ''.

    What a page takes for granted, such as a file that its reader has, is made by tests/documents/before/PAGE.py, and
    what comes of its blocks is checked by tests/documents/after/PAGE.py, in the same namespace.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = SERVER.Process(target=_run, args=(page, blocks, Path(folder), narrow))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return f'still running after {seconds:.0f} s'
        printed = Path(folder, 'printed.txt').read_text(encoding='utf-8', errors='replace')
        return '' if process.exitcode == 0 else f'exit code {process.exitcode}\n{printed[-6000:]}'


def _run(page: Path, blocks: list[Block], folder: Path, narrow: bool) -> None:
    import torch

    os.chdir(folder)
    printed = os.open('printed.txt', os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout = sys.stderr = open(printed, 'w', encoding='utf-8', buffering=1)  # noqa: SIM115 - until the process ends
    os.environ['MPLBACKEND'] = 'agg'
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if narrow:
        _narrow_models()
    sys.modules['__main__'] = types.ModuleType('__main__')  # timm looks for a model's settings in its module
    names = vars(sys.modules['__main__'])
    try:
        names |= {name: value for name, value in _run_file('before', page, names).items() if name[:2] != '__'}
        for block in blocks:
            # lines are those of the page, in tracebacks
            exec(compile('\n' * (block.line - 1) + block.text, str(page), 'exec'), names)
        _run_file('after', page, names)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)


def _narrow_models() -> None:
    from timm.models import _registry

    for name, make in _registry._model_entrypoints.items():
        for pattern, smaller in NARROW.items():
            if re.fullmatch(pattern, name):
                _registry._model_entrypoints[name] = _with_defaults(make, smaller)


def _with_defaults(make: Callable, defaults: dict) -> Callable:
    return lambda pretrained=False, **given: make(pretrained=pretrained, **{**defaults, **given})


def _run_file(when: str, page: Path, names: dict) -> dict:
    file = script(when, page)
    given = {name: value for name, value in names.items() if not name.startswith('__')}
    return runpy.run_path(str(file), given) if file.is_file() else {}


def script(when: str, page: Path) -> Path:
    return ROOT / 'tests' / 'documents' / when / f'{page.stem}.py'
