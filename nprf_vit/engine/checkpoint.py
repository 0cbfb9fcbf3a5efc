"""Checkpoints: the whole state of a run in one file that is either complete or absent."""

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError, first_line
from .build import Training
from .config import differences
from .meter import LossMeter
from .model import load_exact

FORMAT = 1


@dataclass
class Progress:
    """How far a run has come. Random generators need no place here: each is seeded by (seed, step or sample)."""

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)  # one row per finished epoch
    best: dict[str, Any] | None = None  # the row of the best epoch


def atomic_save(content: dict[str, Any], path: Path) -> None:
    """Write beside the target, flush to the disk, then rename: a reader sees the old file or the new one, whole."""
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        with open(temporary, 'wb') as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def run_state(run: Training, progress: Progress, meter: LossMeter) -> dict[str, Any]:
    """All that a continuation needs. Collective: the meter averages over ranks."""
    return {
        'format': FORMAT,
        'config': run.config.to_dict(),
        'step': progress.step,
        'history': progress.history,
        'best': progress.best,
        'meter': meter.state_dict(),
        'state_dict': run.model.state_dict(),
        'state_dict_ema': None if run.ema is None else run.ema.module.state_dict(),
        'optimizer': run.optimizer.state_dict(),
        'scheduler': {'step': progress.step},
        'scaler': run.scaler.state_dict(),
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


def read_checkpoint(path: str | Path, any_format: bool = False) -> dict[str, Any]:
    """Read a checkpoint of ours (or, if asked, any dict) without executing anything in it."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f'no checkpoint file {path}')
    try:
        content = torch.load(path, map_location='cpu', weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        raise InputError(f'cannot read checkpoint {path}: {first_line(error)}') from error
    if not isinstance(content, dict) or (content.get('format') != FORMAT and not any_format):
        raise InputError(f'{path} is no checkpoint of this package (format {FORMAT}); initial_checkpoint takes others')
    return content


def restore(run: Training, meter: LossMeter, content: dict[str, Any], origin: str) -> Progress:
    """Put a run back to where the checkpoint left it."""
    if 'optimizer' not in content:
        raise InputError(f'{origin} holds weights only: resume from last.pt, or start from it as initial_checkpoint')
    changed = differences(content['config'], run.config.to_dict())
    if changed:
        raise InputError(f'{origin} belongs to another configuration: ' + '; '.join(changed[:8]))
    load_exact(run.model, content['state_dict'], origin)
    if run.ema is not None:
        load_exact(run.ema.module, content['state_dict_ema'], origin)
    run.optimizer.load_state_dict(content['optimizer'])
    run.scaler.load_state_dict(content['scaler'])
    run.scheduler.step_update(content['step'])
    meter.load_state_dict(content['meter'])
    return Progress(content['step'], content['history'], content['best'])
