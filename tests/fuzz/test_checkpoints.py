"""Checkpoints that are whole, sealed and wrong: each is refused in one line, or does no harm.

    python -m pytest tests/fuzz/test_checkpoints.py --budget 2000

Every case is a checkpoint of a real run with one to three parts replaced by something else.
"""

import contextlib
import copy
import random
import resource
import shutil
import time
import zipfile

import pytest
import torch

from nprf_vit.engine.checkpoint.checksum import checksum
from nprf_vit.engine.checkpoint.file import DAMAGE, read_checkpoint
from nprf_vit.engine.checkpoint.state import check_continues
from nprf_vit.engine.model import build_model
from nprf_vit.engine.train import train
from nprf_vit.engine.validate import load_models
from nprf_vit.errors import InputError

from ..data.folders import CLASSES, digit_folder
from ..engine.running import ONE, run_here, small_config
from .budget import cases

SECONDS, MEGABYTES = 20, 600  # of one case on a busy machine; of all of them


def nested(depth, leaf=0):
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


def endless():
    value = []
    value.append(value)
    return value


def endless_dict():
    value = {}
    value['a'] = value
    return value


def doubled(levels):
    value = ['x']
    for _ in range(levels):
        value = [value, value]
    return value


def shape_of(old):
    """That of a tensor; of one that an earlier damage made as wide as a petabyte, a small one."""
    return old.shape if isinstance(old, torch.Tensor) and old.numel() <= 2**20 else (4,)


VALUES = {
    'nothing': lambda old, rng: None,
    'true': lambda old, rng: True,
    'text': lambda old, rng: 'x' * rng.choice((0, 1, 5000)),
    'integer': lambda old, rng: rng.choice((-1, 0, 7, 2**31, 2**63 - 1, 2**64 - 1, 2**200)),
    'real': lambda old, rng: rng.choice((float('nan'), float('inf'), -1.5, 1e300)),
    'empty list': lambda old, rng: [],
    'empty dict': lambda old, rng: {},
    'list of the tensor': lambda old, rng: torch.zeros(shape_of(old)).tolist(),
    'dict': lambda old, rng: {'a': old},
    'tuple': lambda old, rng: (old, old),
    'deep': lambda old, rng: nested(rng.choice((5, 50, 900))),
    'endless': lambda old, rng: endless(),
    'endless dict': lambda old, rng: endless_dict(),
    'doubled': lambda old, rng: doubled(rng.choice((10, 40))),
    'sparse': lambda old, rng: torch.eye(4).to_sparse(),
    'csr': lambda old, rng: torch.eye(4).to_sparse_csr(),
    'meta': lambda old, rng: torch.empty(shape_of(old), device='meta'),
    'complex': lambda old, rng: torch.zeros(shape_of(old), dtype=torch.complex64),
    'bool': lambda old, rng: torch.zeros(shape_of(old), dtype=torch.bool),
    'double': lambda old, rng: torch.zeros(shape_of(old), dtype=torch.float64),
    'quantized': lambda old, rng: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
    'stride 0': lambda old, rng: torch.zeros(1).expand(rng.choice((64, 2**20, 2**40))),
    'as wide as the old': lambda old, rng: torch.zeros(1).expand(shape_of(old)),
    'scalar': lambda old, rng: torch.zeros(()),
    'no elements': lambda old, rng: torch.zeros(rng.choice(((0,), (0, 2**40), (3, 0)))),
    'one more': lambda old, rng: torch.zeros([n + 1 for n in shape_of(old)]),
    'transposed': lambda old, rng: old.t().contiguous() if isinstance(old, torch.Tensor) and old.ndim == 2 else old,
    'not a number': lambda old, rng: torch.full(shape_of(old), float('nan')),
    'parameter': lambda old, rng: torch.nn.Parameter(torch.zeros(shape_of(old))),
    'storage': lambda old, rng: torch.zeros(4).untyped_storage(),
    'size': lambda old, rng: torch.Size([2**40, 2]),
    'type': lambda old, rng: torch.float32,
    'bytes': lambda old, rng: b'x' * 50,
    'set': lambda old, rng: {1, 2},
    'large kwargs': lambda old, rng: {'embed_dim': 65536, 'depth': 1000, 'num_heads': 0},
}


def places(content, path=()):
    """The paths of all entries; of long lists and dicts a part."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(items)[:40]:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def parent(content, path):
    for key in path[:-1]:
        content = content[key]
    return content


def damage(content, known, rng):
    """Replace, remove or add at one of the known places; returns what was done."""
    top = rng.choice(list(content))
    below = [path for path in known if path[0] == top]
    path = rng.choice(below) if rng.random() < 0.8 else (top,)
    holder = parent(content, path)
    how = rng.choice(('remove', 'add', *VALUES, *VALUES))
    if how == 'remove':
        del holder[path[-1]]
    elif how == 'add' and isinstance(holder, dict):
        holder[rng.choice(('', 'another', 2**40, -1))] = rng.choice(list(VALUES.values()))(None, rng)
    elif how != 'add':
        holder[path[-1]] = VALUES[how](holder[path[-1]], rng)
    return f'{how} at {"/".join(map(str, path))}'


def bounded(value, depth=0, count=None):
    """Whether a checksum can be computed without hanging on it."""
    count = [0] if count is None else count
    count[0] += 1
    if depth > 100 or count[0] > 200_000 or (isinstance(value, torch.Tensor) and value.numel() > 2**24):
        return False
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return all(bounded(item, depth + 1, count) for item in items)


def seal(content):
    """With its own checksum, as far as it can have one."""
    content.pop('checksum', None)
    if bounded(content):
        with contextlib.suppress(*DAMAGE, NotImplementedError):
            content['checksum'] = checksum(content)


def deflate(path, rng):
    """The same members, compressed; or one that inflates to a gigabyte."""
    members = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            members[name] = archive.read(name)
    if rng.random() < 0.3:
        members['archive/data/0'] = bytes(2**28)
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def write_wrong(good, path, rng):
    content, known = copy.deepcopy(good), list(places(good))
    said = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):  # of a place that is gone by now
            said.append(damage(content, known, rng))
    seal(content)
    with contextlib.suppress(RecursionError):  # 900 levels are more than torch.save takes
        torch.save(content, path)
    if path.is_file() and rng.random() < 0.05:
        said.append('deflated')
        deflate(path, rng)
    return '; '.join(said)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run of three steps, its keys, and the content of its checkpoint."""
    folder = tmp_path_factory.mktemp('run')
    data = digit_folder(folder / 'scans', train=20, val=4)
    keys = {'dataset': '', 'data_dir': str(data), 'num_classes': CLASSES, 'global_batch': 16, 'batch_size': 16}
    keys |= {'epochs': 1, 'warmup_epochs': 0, 'recovery_interval': 1}
    run_here(folder / 'out', stop_at=3, **keys)
    return folder / 'out', keys, read_checkpoint(folder / 'out' / 'last.pt')


def enter(path, config):
    """Every way in but the continuation of a run; an InputError is an answer, anything else is not."""
    for way in (
        lambda: check_continues(read_checkpoint(path), str(path), config.to_dict()),
        lambda: load_models(build_model(config, fresh=False), str(path), config),
        lambda: build_model(small_config(**{**config.to_dict(), 'initial_checkpoint': str(path)})),
    ):
        try:
            way()
        except InputError as error:
            assert '\n' not in str(error).strip() and len(str(error)) < 2000, error


def test_a_wrong_checkpoint_is_told_in_one_line(run, tmp_path):
    folder, keys, good = run
    config, path = small_config(**keys), tmp_path / 'last.pt'
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(cases(40)):
        path.unlink(missing_ok=True)
        what = write_wrong(good, path, random.Random(number))
        if not path.is_file():
            continue
        begin = time.monotonic()
        try:
            enter(path, config)
        except Exception as error:
            raise AssertionError(f'case {number}: {what}') from error
        assert time.monotonic() - begin < SECONDS, f'case {number}: {what}'
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES, f'{grown:.0f} MB'


def test_a_run_goes_on_from_the_next_good_one(run, tmp_path, capsys):
    """The good one is behind it; with either, all steps are done in the end."""
    folder, keys, good = run
    for number in range(cases(6)):
        out = tmp_path / str(number)
        shutil.copytree(folder, out)
        (out / 'last.pt').rename(out / 'last-1.pt')
        what = write_wrong(good, out / 'last.pt', random.Random(f'run {number}'))
        try:
            row = train(small_config(**keys), ONE, out, 'auto')
        except Exception as error:
            raise AssertionError(f'case {number}: {what}') from error
        else:
            assert row['step'] == 5, f'case {number}: {what}'
        shutil.rmtree(out)
