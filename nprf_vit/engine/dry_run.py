"""`--dry-run`: would this run fit, and how long would it take?"""

import resource
import sys
import time
from dataclasses import replace

import torch

from .build import Training, build_training
from .config import Config
from .distributed import Place
from .step import Clock, train_step

STEPS = 2


def dry_run(config: Config, place: Place) -> dict[str, float]:
    """Build everything, run two updates of one per-device batch each on synthetic images, and extrapolate.

    An accumulating run repeats the same forward and backward, so one micro-batch shows its memory and its speed.
    """
    run = build_training(config, place, synthetic=True)
    plan = run.plan
    run.plan = replace(plan, accumulation=1, global_batch=plan.micro * plan.world)
    seconds = _timed_steps(run)
    images_per_s = plan.micro * place.world / seconds
    days = run.total_steps * config.global_batch / images_per_s / 86400
    result = {
        'parameters': sum(p.numel() for p in run.model.parameters()),
        'memory_bytes': _peak_memory(place),
        'images_per_s': images_per_s,
        'days': days,
    }
    if place.is_main:
        print(f'{config.model}: {result["parameters"] / 1e6:.2f} M parameters')
        print(plan)
        print(f'memory per device: {result["memory_bytes"] / 2**30:.2f} GiB at its peak')
        print(f'{images_per_s:.1f} images/s on synthetic images, without loading or evaluation')
        total = f'{config.epochs} epochs x {run.data.steps_per_epoch} steps'
        print(f'estimated {days:.2f} days ({days * 24:.1f} hours) for {total}')
    return result


def _timed_steps(run: Training) -> float:
    """Seconds of the last of two updates: the first one also allocates, tunes and compiles."""
    run.wrapped.train()
    batches = run.data.epoch(0, 0)
    for step in range(STEPS):
        _wait(run.place)
        begin = time.perf_counter()
        clock = Clock()
        train_step(run, batches, step, clock)
        _wait(run.place)
        seconds = time.perf_counter() - begin - clock.waited
    return seconds


def _wait(place: Place) -> None:
    if place.device.type == 'cuda':
        torch.cuda.synchronize(place.device)


def _peak_memory(place: Place) -> int:
    if place.device.type == 'cuda':
        return torch.cuda.max_memory_allocated(place.device)
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
