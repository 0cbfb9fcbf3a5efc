"""One optimizer update from the micro-batches of one global batch."""

import contextlib
import time
from collections.abc import Iterator

import torch
from timm.models import model_parameters
from timm.utils import dispatch_clip_grad

from ..data.seeding import derive_seed
from .build import Training


class Clock:
    """Seconds spent training and, of these, waiting for data."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.started, self.waited = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    @property
    def elapsed(self) -> float:
        return max(time.perf_counter() - self.started, 1e-9)

    @property
    def wait_share(self) -> float:
        return self.waited / self.elapsed


def train_step(run: Training, micro_batches: Iterator, step: int, clock: Clock) -> torch.Tensor:
    """Update the weights by global batch number `step`; returns this rank's mean loss, still on the device."""
    epoch = step // run.data.steps_per_epoch
    # dropout and drop path draw from (seed, step, rank) alone, so a resumed run needs no saved generator
    torch.manual_seed(derive_seed(run.config.seed, 'model', step, run.place.rank))
    total = torch.zeros((), device=run.place.device)
    for micro_step in range(run.plan.accumulation):
        with clock.waiting():
            images, targets = next(micro_batches)
        images, targets = (x.to(run.place.device, non_blocking=True) for x in (images, targets))
        slot = run.plan.first_slot(micro_step, run.place.rank)
        images, targets = run.task.mix(images, targets, step, epoch, slot)
        with _no_sync(run, last=micro_step == run.plan.accumulation - 1):
            with run.autocast():
                logits = run.wrapped(images)
            # every micro-batch has the same size, so the mean of means is the mean over the global batch
            loss = run.task.loss(logits, targets) / run.plan.accumulation
            run.scaler.scale(loss).backward()
        total += loss.detach()
    _update(run, step + 1)
    return total


def _no_sync(run: Training, last: bool) -> contextlib.AbstractContextManager:
    """Exchange gradients once per update, with the last micro-batch."""
    if last or run.place.world == 1:
        return contextlib.nullcontext()
    return getattr(run.wrapped, '_orig_mod', run.wrapped).no_sync()


def _update(run: Training, done: int) -> None:
    config = run.config
    if config.clip_grad is not None:
        run.scaler.unscale_(run.optimizer)
        parameters = model_parameters(run.model, exclude_head='agc' in config.clip_mode)
        dispatch_clip_grad(parameters, config.clip_grad, mode=config.clip_mode)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    if run.ema is not None:
        run.ema.update(run.model, step=done)
    run.scheduler.step_update(done)
