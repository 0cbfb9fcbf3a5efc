"""The whole state of a run: into a checkpoint, and back."""

from dataclasses import dataclass, field
from typing import Any

from ..data.seeding import derive_seed
from ..errors import InputError
from .build import Training
from .checkpoint import FORMAT
from .config import differences
from .meter import LossMeter
from .model import load_exact


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)  # one row per finished epoch
    best: dict[str, Any] | None = None  # the row of the best epoch, whose weights are in best.pt
    skipped: dict[str, int] = field(default_factory=lambda: {'total': 0, 'epoch': 0, 'in_a_row': 0})
    bad_images: dict[int, str] = field(default_factory=dict)  # index of the training set → what is wrong with it
    failed_augmentations: int = 0
    unaugmented: dict[int, str] = field(default_factory=dict)  # the images of the first of these, and the reasons


def run_state(run: Training, progress: Progress, meter: LossMeter) -> dict[str, Any]:
    """All that a continuation needs. Collective: the meter averages over ranks."""
    return {
        'format': FORMAT,
        'config': run.config.to_dict(),
        'step': progress.step,
        'history': progress.history,
        'best': progress.best,
        'skipped': dict(progress.skipped),
        'bad_images': dict(progress.bad_images),
        'failed_augmentations': progress.failed_augmentations,
        'unaugmented': dict(progress.unaugmented),
        'meter': meter.state_dict(),
        'state_dict': run.model.state_dict(),
        'state_dict_ema': None if run.ema is None else run.ema.module.state_dict(),
        'optimizer': run.optimizer.state_dict(),
        'scheduler': {'step': progress.step},
        'scaler': run.scaler.state_dict(),
        'position': _position(run, progress.step),
        'generators': [model_seed(run.config.seed, progress.step, rank) for rank in range(run.place.world)],
    }


def weights_state(run: Training, row: dict[str, Any]) -> dict[str, Any]:
    """What evaluation and fine-tuning need; the names of the state dicts are those timm looks for."""
    return {
        'format': FORMAT,
        'config': run.config.to_dict(),
        'step': row['step'],
        'metrics': row,
        'state_dict': run.model.state_dict(),
        'state_dict_ema': None if run.ema is None else run.ema.module.state_dict(),
    }


def model_seed(seed: int, step: int, rank: int) -> int:
    """Where a rank's random generators stand at the beginning of a step: dropout and drop path draw from these."""
    return derive_seed(seed, 'model', step, rank)


def _position(run: Training, step: int) -> dict[str, Any]:
    """Where in the data the next step begins, and enough of its samples to notice another order."""
    epoch, first = divmod(step, run.data.steps_per_epoch)
    indices = run.data.indices(step)
    return {'epoch': epoch, 'step': first, 'images': run.data.images, 'next': indices and indices[:8]}


def check_continues(content: dict[str, Any], origin: str, config: dict[str, Any]) -> None:
    """Raise unless this is a checkpoint of a run with this configuration."""
    if 'optimizer' not in content:
        raise InputError(f'{origin} holds weights only: resume from last.pt, or start from it as initial_checkpoint')
    changed = differences(content['config'], config)
    if changed:
        raise InputError(f'{origin} belongs to another configuration: ' + '; '.join(changed[:8]))


def restore(run: Training, meter: LossMeter, content: dict[str, Any], origin: str) -> Progress:
    """Put a run, whose model has the checkpoint's weights already, back to where the checkpoint left it."""
    step = content['step']
    if content['format'] > 1:
        _check_place(run, content, origin)
    if run.ema is not None:
        load_exact(run.ema.module, content['state_dict_ema'], origin)
    run.optimizer.load_state_dict(content['optimizer'])
    run.scaler.load_state_dict(content['scaler'])
    run.scheduler.step_update(step)
    meter.load_state_dict(content['meter'])
    names = 'skipped', 'bad_images', 'failed_augmentations', 'unaugmented'
    faults = {name: content[name] for name in names if name in content}  # older checkpoints lack the later ones
    return Progress(step, content['history'], content['best'], **faults)


def _check_place(run: Training, content: dict[str, Any], origin: str) -> None:
    """Order and random numbers are functions of the seed; a data set or a version that changes them is refused."""
    step, there = content['step'], content['position']
    here = _position(run, step)
    if there['images'] != here['images']:
        raise InputError(
            f'{origin} was written with {there["images"]} training images, and there are {here["images"]} now: '
            'the order of samples would change'
        )
    seeds = [model_seed(run.config.seed, step, rank) for rank in range(len(content['generators']))]
    if there != here or content['generators'] != seeds:
        raise InputError(f'{origin} continues with other samples or random numbers than this version would draw')
