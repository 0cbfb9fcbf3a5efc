"""A training run from its configuration to its last line."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError
from . import curves
from .build import Training, build_training
from .checkpoint import Progress, read_checkpoint, restore
from .config import Config
from .distributed import Place
from .loop import Loop
from .meter import LossMeter
from .output import check_output, open_output, write_rows
from .report import results_table


def train(
    config: Config,
    place: Place,
    folder: Path,
    resume: str | None = None,
    should_stop: Callable[[int], bool] | None = None,
) -> dict[str, Any] | None:
    """Train, or continue; returns the last epoch's row, or None if the run was asked to stop.

    Args:
        folder: Output folder, shared by all ranks.
        resume: 'auto' for the folder's last.pt if it has one, or a checkpoint file.
    """
    check_output(folder, config, resume)
    if config.tensorboard and importlib.util.find_spec('tensorboard') is None:
        raise InputError('tensorboard: true needs the package tensorboard: install nprf_vit[tensorboard]')
    source = _checkpoint_file(folder, resume)
    content = read_checkpoint(source) if source else None
    run = build_training(config, place, fresh=content is None)
    meter = LossMeter(place)
    progress = restore(run, meter, content, str(source)) if content else Progress()
    place.barrier()  # every rank has looked into the folder before one writes to it
    if place.is_main:
        open_output(folder, config, place.world)
        if progress.history:
            write_rows(folder / 'summary.csv', progress.history)
    place.barrier()
    loop = Loop(run, progress, meter, folder, should_stop)
    loop.report.say(_opening(run, progress, folder))
    if len(progress.history) == config.epochs:
        loop.report.say(f'{source} is finished: {config.epochs} epochs, {progress.step} steps; nothing left to do')
    if not loop.go():
        loop.report.say(f'stopped at step {progress.step}; continue with --resume auto')
        return None
    loop.report.say(_closing(run, progress, folder))
    return progress.history[-1]


def _checkpoint_file(folder: Path, resume: str | None) -> Path | None:
    if not resume:
        return None
    if resume != 'auto':
        return Path(resume)
    last = folder / 'last.pt'
    return last if last.is_file() else None


def _opening(run: Training, progress: Progress, folder: Path) -> str:
    parameters = sum(p.numel() for p in run.model.parameters())
    lines = [
        f'{run.config.model}: {parameters / 1e6:.2f} M parameters on {run.place.world} x {run.place.device.type}',
        f'{run.plan}; {run.data.steps_per_epoch} steps per epoch, {run.config.epochs} epochs; output in {folder}',
    ]
    if run.data.is_stream:
        lines.append(f'{run.config.dataset} is read in order: checkpoints and resume at epoch boundaries only')
    if not curves.available:
        lines.append('matplotlib is not installed: no curves.png (install nprf_vit[plot])')
    if progress.step:
        epoch, step = divmod(progress.step, run.data.steps_per_epoch)
        lines.append(f'continuing after step {progress.step} (epoch {epoch + 1}, {step} steps into it)')
    return '\n'.join(lines)


def _closing(run: Training, progress: Progress, folder: Path) -> str:
    best, name = progress.best, run.config.eval_metric
    lines = [results_table(run.config, progress.history[-1])]
    if best:
        lines.append(f'best {name} {best[name]:.4g} after epoch {best["epoch"]}; weights in {folder / "best.pt"}')
    return '\n'.join(lines)
