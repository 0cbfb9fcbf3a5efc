"""One optimizer update from the micro-batches of one global batch, or none if its numbers have gone bad."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from timm.models import model_parameters
from timm.utils import dispatch_clip_grad
from torch.nn.utils import get_total_norm

from nprf_vit.engine.checkpoint.state import model_seed

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


@dataclass
class Outcome:
    """What came of a step, the same on all ranks except where it says so."""

    loss: torch.Tensor  # this rank's mean, still on the device
    reason: str | None = None  # 'loss' or 'gradient', whichever was not finite on some rank: no update was made
    suspects: list[int] = field(default_factory=list)  # slots of this rank's micro-batches with a non-finite loss
    bad_images: int = 0  # how many could not be read, on all ranks
    notes: list[str] = field(default_factory=list)  # about those of this rank
    requests: list[bool] = field(default_factory=list)  # of `ask`, each true when it was on some rank


def train_step(
    run: Training,
    micro_batches: Iterator,
    step: int,
    clock: Clock,
    ask: Callable[[int], Sequence[bool]] = lambda done: (),
) -> Outcome:
    """Update the weights by global batch number `step`.

    Args:
        ask: Requests of this rank once `step + 1` steps are done. Ranks agree on them together with the check of the
            numbers: one small reduction and one look at the device per step.
    """
    place, plan, heartbeat = run.place, run.plan, run.place.heartbeat
    torch.manual_seed(model_seed(run.config.seed, step, place.rank))
    losses, notes = _accumulate(run, micro_batches, step, clock)
    total = torch.zeros((), device=place.device)
    for loss in losses:
        total += loss
    heartbeat.enter('agreeing')
    bad_loss, bad_gradient, bad_images, *requests = _agree(run, total, [len(notes), *ask(step + 1)])
    outcome = Outcome(total, bad_images=bad_images, notes=notes, requests=[bool(request) for request in requests])
    heartbeat.enter('update')
    if bad_loss or bad_gradient:
        outcome.reason = 'loss' if bad_loss else 'gradient'
        wrong = [i for i, loss in enumerate(losses) if not loss.isfinite()]
        outcome.suspects = [plan.first_slot(i, place.rank) + k for i in wrong for k in range(plan.micro)]
        run.optimizer.zero_grad()
    else:
        _update(run, step + 1)
    run.scheduler.step_update(step + 1)
    return outcome


def _accumulate(
    run: Training, micro_batches: Iterator, step: int, clock: Clock
) -> tuple[list[torch.Tensor], list[str]]:
    """Gradients of a global batch; returns the share of each micro-batch in the loss, and notes on its images."""
    place, plan, heartbeat = run.place, run.plan, run.place.heartbeat
    epoch = step // run.data.steps_per_epoch
    losses, notes = [], []
    for micro_step in range(plan.accumulation):
        heartbeat.enter('waiting for data', step + 1, micro_step)
        with clock.waiting():
            images, targets, *more = next(micro_batches)
        notes += [note for part in more for note in part if note]
        images, targets = (x.to(place.device, non_blocking=True) for x in (images, targets))
        images, targets = run.task.mix(images, targets, step, epoch, plan.first_slot(micro_step, place.rank))
        with _no_sync(run, last=micro_step == plan.accumulation - 1):
            heartbeat.enter('forward')
            with run.autocast():
                logits = run.wrapped(images)
            # every micro-batch has the same size, so the mean of means is the mean over the global batch
            loss = run.task.loss(logits, targets) / plan.accumulation
            heartbeat.enter('backward')
            run.scaler.scale(loss).backward()
        losses.append(loss.detach())
    return losses, notes


def _agree(run: Training, loss: torch.Tensor, counts: list[int]) -> list[int]:
    """[non-finite losses, non-finite gradients, *counts], each summed over ranks."""
    checks = [~loss.isfinite(), torch.zeros_like(loss, dtype=torch.bool)]
    # with a scaler, infinite gradients are its way of finding the scale, until the scale cannot be the reason any more
    if not run.scaler.is_enabled() or run.scaler.get_scale() < 1:
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        checks[1] = ~get_total_norm(gradients, math.inf).isfinite()  # not the 2-norm, whose squares overflow
    given = torch.tensor([int(count) for count in counts], dtype=torch.int64, device=loss.device)
    return run.place.sum(torch.cat([torch.stack(checks).long(), given])).tolist()


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
