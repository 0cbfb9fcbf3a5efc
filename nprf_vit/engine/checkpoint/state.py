"""The whole state of a run: into a checkpoint, and back."""

from dataclasses import asdict, dataclass, field
from typing import Any

from nprf_vit.config.schema import differences
from nprf_vit.data.seeding import derive_seed
from nprf_vit.engine.build import Training
from nprf_vit.engine.loss_meter import LossMeter
from nprf_vit.engine.model import load_exact
from nprf_vit.errors import InputError, first_line

from .file import DAMAGE, FORMAT, WrongCheckpoint
from .optimizer_state import expected_state, find_misfit, for_this_device
from .schema import RUN, find_missing


@dataclass
class SkippedSteps:
    """How many steps made no update, for a loss or a gradient that was not finite."""

    total: int = 0
    epoch: int = 0  # since it began
    in_a_row: int = 0  # up to the last step

    def add(self) -> None:
        self.total, self.epoch, self.in_a_row = self.total + 1, self.epoch + 1, self.in_a_row + 1


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)  # one row per finished epoch
    best: dict[str, Any] | None = None  # the row of the best epoch, whose weights are in best.pt
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    bad_images: dict[int, str] = field(default_factory=dict)  # index of the training set → what is wrong with it
    failed_augmentations: int = 0
    unaugmented: dict[int, str] = field(default_factory=dict)  # the images of the first of these, and the reasons


def run_state(run: Training, progress: Progress, meter: LossMeter) -> dict[str, Any]:
    """All that a continuation needs."""
    return {
        'format': FORMAT,
        'config': run.config.to_dict(),
        'step': progress.step,
        'history': progress.history,
        'best': progress.best,
        'skipped': asdict(progress.skipped),
        'bad_images': dict(progress.bad_images),
        'failed_augmentations': progress.failed_augmentations,
        'unaugmented': dict(progress.unaugmented),
        'meter': meter.state_dict(),
        'state_dict': run.model.state_dict(),
        'state_dict_ema': None if run.ema is None else run.ema.module.state_dict(),
        'optimizer': run.optimizer.state_dict(),
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
    missing = find_missing(content, RUN)
    if missing:
        raise WrongCheckpoint(f'cannot continue from {origin}: {missing}')
    changed = differences(content['config'], config)
    if changed:
        raise InputError(f'{origin} belongs to another configuration: ' + '; '.join(c[:200] for c in changed[:8]))


def restore(run: Training, meter: LossMeter, content: dict[str, Any], origin: str) -> Progress:
    """Put a run, whose model has the checkpoint's weights already, back to where the checkpoint left it.

    WrongCheckpoint when it cannot be; the run is of no use then.
    """
    step = content['step']
    _check_progress(run, content, origin)
    _check_place(run, content, origin)
    if run.ema is not None:
        load_exact(run.ema.module, content['state_dict_ema'], origin)
    expected = expected_state(run.optimizer)
    try:
        run.optimizer.load_state_dict(for_this_device(content['optimizer'], run.optimizer))
        run.scaler.load_state_dict(content['scaler'])
    except DAMAGE as error:
        raise WrongCheckpoint(f'cannot continue from {origin}: {first_line(error)[:200]}') from error
    fault = find_misfit(run.optimizer, expected)
    if fault:
        raise WrongCheckpoint(f'cannot continue from {origin}: the state of the optimizer does not fit: {fault}')
    run.schedule.step_update(step)
    meter.load_state_dict(content['meter'])
    later = {name: content[name] for name in ('failed_augmentations', 'unaugmented') if name in content}
    skipped = SkippedSteps(**content['skipped'])
    return Progress(step, content['history'], content['best'], skipped, content['bad_images'], **later)


def _check_progress(run: Training, content: dict[str, Any], origin: str) -> None:
    """Steps, epochs and rows as a run of this length can have them."""
    step, history, best, metric = content['step'], content['history'], content['best'], run.config.eval_metric
    into = step - len(history) * run.data.steps_per_epoch
    if len(history) > run.config.epochs or not 0 <= into <= run.data.steps_per_epoch or step > run.total_steps:
        raise WrongCheckpoint(
            f'cannot continue from {origin}: {len(history)} epochs and step {step} of a run of {run.config.epochs} '
            f'epochs with {run.data.steps_per_epoch} steps each'
        )
    rows = [*history, *([best] if best else [])]
    if not all(type(row.get('epoch')) is int and type(row.get('step')) is int for row in rows):
        raise WrongCheckpoint(f'cannot continue from {origin}: rows of its history have no epoch or step')
    if best and type(best.get(metric)) not in (int, float):
        raise WrongCheckpoint(f'cannot continue from {origin}: its best row has no {metric}')
    if run.ema is not None and content['state_dict_ema'] is None:
        raise WrongCheckpoint(f'cannot continue from {origin}: it has no moving average')


def _check_place(run: Training, content: dict[str, Any], origin: str) -> None:
    """Order and random numbers are functions of the seed; a data set or a version that changes them is refused."""
    step, there = content['step'], content['position']
    here = _position(run, step)
    if there['images'] != here['images']:
        raise WrongCheckpoint(
            f'{origin} was written with {there["images"]} training images, and there are {here["images"]} now: '
            'the order of samples would change'
        )
    seeds = [model_seed(run.config.seed, step, rank) for rank in range(len(content['generators']))]
    if there != here or content['generators'] != seeds:
        raise WrongCheckpoint(f'{origin} continues with other samples or random numbers than this version would draw')
