"""The ImageNet and ImageNet32 configs at length, on real photographs, with a model that a CPU can train.

The data pipeline is the file's; the model, the global batch and the number of epochs are smaller. By environment:

RECIPE_SAMPLES      samples through the pipeline that the ImageNet configs share (default 2000)
RECIPE_STEPS        steps of each run in two processes, at least; two epochs, killed half-way (default 62)
RECIPE_PIXEL_STEPS  the same for the ImageNet32 configs (default 20)
RECIPE_QUIET        0: without the second, quiet run, to which the first is compared (default 1)
RECIPE_PHOTOGRAPHS  folders of photographs, separated by colons (default: the two of scikit-learn)
"""

import collections
import math
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from nprf_vit.config.yaml_file import dump_config, load_config, override
from nprf_vit.data import transforms
from nprf_vit.engine.build import build_training
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.csv_file import read_rows

from ..engine.running import ONE, ROOT, assert_same_end, launch, wait_for
from .photographs import photograph_folder, piece
from .photographs import photographs as photographs_of
from .test_pixel_tables import NAMES
from .test_tables import CONFIGS, IMAGENET, ROWS

pytestmark = pytest.mark.slow
SAMPLES, STEPS = int(os.environ.get('RECIPE_SAMPLES', 2000)), int(os.environ.get('RECIPE_STEPS', 62))
PIXEL_STEPS = int(os.environ.get('RECIPE_PIXEL_STEPS', 20))
QUIET = os.environ.get('RECIPE_QUIET', '1') == '1'
SMALL = {'embed_dim': 32, 'depth': 1, 'num_heads': 2}
CLASSES, BATCH = 1000, 64  # two blocks of mixing, one for each process
PER_CLASS = math.ceil(STEPS * BATCH / CLASSES / 2)
HALF = '+float16'  # the gradient scaler, which no file asks for by itself


@pytest.fixture(scope='module')
def photographs(tmp_path_factory):
    given = [Path(name) for name in os.environ.get('RECIPE_PHOTOGRAPHS', '').split(':') if name]
    return photograph_folder(tmp_path_factory.mktemp('photographs'), given, CLASSES, PER_CLASS)


@pytest.fixture(scope='module')
def deit(tmp_path_factory):
    """A checkpoint as DeiT's authors publish theirs, of the small size."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp('deit') / 'deit.pth'
    torch.save({'model': timm.create_model('deit_base_patch16_224', **SMALL).state_dict()}, path)
    return path


def recipe(name, photographs, deit):
    """A file's configuration with nothing changed but sizes, counts and paths."""
    config = load_config(IMAGENET / f'{name.removesuffix(HALF)}.yaml')
    changes = {'data_dir': str(photographs), 'train_images': CLASSES * PER_CLASS, 'val_images': CLASSES}
    changes |= {'model_kwargs': SMALL, 'global_batch': BATCH, 'batch_size': 32, 'workers': 1, 'threads': 1}
    changes |= {'epochs': 2, 'warmup_epochs': 1, 'log_interval': 5, 'recovery_interval': 5}
    changes |= {'initial_checkpoint': str(deit)} if config.initial_checkpoint else {}
    changes |= {'amp_dtype': 'float16'} if name.endswith(HALF) else {}
    return override(config, **changes)


def first_batch(run):
    """A micro-batch before and after mixing."""
    images, targets = next(run.data.epoch(0, 0))[:2]
    return images, targets, *run.task.mix(images.clone(), targets, 0, 0, run.plan.first_slot(0, 0))


def operations(run):
    """The transform's operations with their arguments, normalization included."""
    return repr(run.data.loader.dataset.transform.transform)


def test_samples(photographs, deit, monkeypatch):
    """All rows make the same samples, so one of them is drained for all."""
    posterize, bits_kept = transforms._posterize, collections.Counter()

    def counted(image, bits, **args):
        bits_kept[bits] += 1
        result = posterize(image, bits, **args)
        assert bits or result.getbbox() is None  # no bits kept: black
        return result

    monkeypatch.setattr(transforms, '_posterize', counted)
    # no workers: the operations are counted in this process
    runs = {name: build_training(override(recipe(name, photographs, deit), workers=0), ONE) for name in ROWS}
    run, *others = runs.values()
    for other in others:
        assert operations(other) == operations(run)
        assert all(map(torch.equal, first_batch(other), first_batch(run)))
    bits_kept.clear()
    black_level = -torch.tensor(IMAGENET_DEFAULT_MEAN) / torch.tensor(IMAGENET_DEFAULT_STD)
    per_epoch, done, black = run.data.steps_per_epoch * run.plan.accumulation, 0, 0
    for epoch in range(math.ceil(SAMPLES / (per_epoch * run.plan.micro))):
        for count, batch in enumerate(run.data.epoch(epoch, 0)):
            assert not batch.faults, batch.faults
            images = batch.images
            assert images.shape[1:] == (3, 224, 224) and images.isfinite().all()
            black += int(((images - black_level[:, None, None]).abs().flatten(1).amax(1) < 1e-3).sum())
            step, part = divmod(epoch * per_epoch + count, run.plan.accumulation)
            images, soft = run.task.mix(images, batch.targets, step, epoch, run.plan.first_slot(part, 0))
            assert images.isfinite().all()
            torch.testing.assert_close(soft.sum(1), torch.ones(len(soft)))  # len(soft), classes
            done += len(images)
    print(f'{done} samples, none bad, bits kept by posterize {dict(bits_kept)}, {black} images black at the end')
    # erasing and other operations may follow one that leaves no bits, and one bit of a dark image is black too
    assert done >= SAMPLES and bits_kept[0] and black


def steps_done(folder):
    rows = read_rows(folder / 'steps.csv') if (folder / 'steps.csv').is_file() else []
    return int(rows[-1]['step']) if rows else 0


def killed_half_way(folder, args, steps):
    """The command under torchrun, killed once half of its steps are in the log; its processes die with it."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    with (
        open(folder / 'killed.log', 'wb') as log,
        subprocess.Popen([*command, *args], cwd=ROOT, stdout=log, stderr=log) as process,
    ):
        wait_for(
            lambda: process.poll() is not None or steps_done(folder / 'out') >= steps // 2, 'half of the steps', 3600
        )
        assert process.poll() is None, (folder / 'killed.log').read_text(encoding='utf-8', errors='replace')
        process.kill()


def two_processes(config, steps, folder):
    """Train in two processes with a SIGKILL half-way; returns the last checkpoint after comparing with a quiet run."""
    file = folder / 'run.yaml'
    file.write_text(dump_config(config), encoding='utf-8')
    args = [str(ROOT / 'train.py'), '--config', str(file), '--output', str(folder / 'out'), '--resume', 'auto']
    killed_half_way(folder, args, steps)
    said = launch('train.py', *args[1:], processes=2, seconds=7200).stdout
    assert 'continuing after step' in said
    content = read_checkpoint(folder / 'out' / 'last.pt')
    assert content['step'] == steps
    assert content['skipped']['total'] == 0 and content['bad_images'] == {} and content['failed_augmentations'] == 0
    losses = [float(row['loss']) for row in read_rows(folder / 'out' / 'steps.csv')]
    print(
        f'{config.model} {config.amp_dtype}: {steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, killed on the way'
    )
    assert all(map(math.isfinite, losses))
    # at a peak of 1e-5, or within a few dozen steps, the loss moves by less than it varies between batches, by 0.02
    assert losses[-1] < losses[0] + (0.05 if config.lr < 1e-4 or steps < 200 else 0)
    if QUIET:
        launch('train.py', *args[1:4], folder / 'quiet', processes=2, seconds=7200)
        assert_same_end(folder / 'quiet', folder / 'out')
    return content


@pytest.mark.parametrize('name', [*ROWS, 'nprf_deit_base' + HALF])
def test_two_processes_killed_and_continued(name, photographs, deit, tmp_path):
    config = recipe(name, photographs, deit)
    content = two_processes(config, config.epochs * (config.train_images // config.global_batch), tmp_path)
    assert bool(content['scaler']) == name.endswith(HALF)


@pytest.mark.parametrize('name', NAMES)
def test_pixels_in_two_processes_killed_and_continued(name, tmp_path):
    train, val = 80, 10
    write_imagenet32(tmp_path / 'data', train, val)
    # softmax weighs all 3072 x 3072 pairs: it gets half of the others' heads and images
    heads, batch = (1, 1) if name.startswith('softmax') else (2, 2)
    changes = {'data_dir': str(tmp_path / 'data'), 'train_images': train, 'val_images': val}
    changes |= {'global_batch': 2 * batch, 'batch_size': batch, 'workers': 1, 'threads': 1}
    changes |= {'model_kwargs': {'embed_dim': 8 * heads, 'depth': 1, 'num_heads': heads}}
    changes |= {'epochs': 2, 'warmup_epochs': 1, 'epoch_steps': PIXEL_STEPS // 2, 'log_interval': 2}
    config = override(load_config(CONFIGS / 'imagenet32' / f'{name}.yaml'), **changes, recovery_interval=2)
    two_processes(config, 2 * config.epoch_steps, tmp_path)


def write_imagenet32(root, train, val):
    """Pieces of photographs as the ten training batches and the one of validation, pickled as they are published."""
    root.mkdir()
    images, rng = photographs_of([]), random.Random(0)
    for name, count in [(f'train_data_batch_{i}', train // 10) for i in range(1, 11)] + [('val_data', val)]:
        pieces = [piece(rng.choice(images), (0, 0, 1, 1), rng).resize((32, 32)) for _ in range(count)]
        data = np.stack([np.asarray(image).transpose(2, 0, 1).reshape(-1) for image in pieces])  # count, 3072
        content = {'data': data, 'labels': [rng.randint(1, 1000) for _ in pieces]}
        (root / name).write_bytes(pickle.dumps(content, protocol=2))
