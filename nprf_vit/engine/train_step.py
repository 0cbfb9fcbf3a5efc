"""One optimizer update from the micro-batches of one global batch, or none if its numbers have gone bad."""

import contextlib
import enum
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from timm.models import model_parameters
from timm.utils import dispatch_clip_grad
from torch.nn.utils import get_total_norm

from nprf_vit.data.batch import Batch, SampleFault
from nprf_vit.engine.checkpoint.state import model_seed
from nprf_vit.engine.distributed.watchdog import Phase

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


class Requests(NamedTuple):
    """What is to be done once a step is over."""

    stop: bool = False
    save: bool = False


class NonFinite(enum.Enum):
    """What kept a step from an update; the values are those in skipped_steps.jsonl."""

    LOSS = 'loss'
    GRADIENT = 'gradient'


@dataclass
class Outcome:
    """What came of a step, the same on all ranks except where it says so."""

    loss: torch.Tensor  # this rank's mean, still on the device
    non_finite: NonFinite | None = None  # on some rank: no update was made
    suspects: list[int] = field(default_factory=list)  # slots of this rank's micro-batches with a non-finite loss
    bad_images: int = 0  # how many could not be read or augmented, on all ranks
    faults: list[SampleFault] = field(default_factory=list)  # those of this rank
    requests: Requests = Requests()  # each true when it was on some rank


class _Agreement(NamedTuple):
    """Sums over ranks."""

    bad_losses: int
    bad_gradients: int
    bad_images: int
    stop: int
    save: int


def train_step(
    run: Training,
    micro_batches: Iterator[Batch],
    step: int,
    clock: Clock,
    ask: Callable[[int], Requests] = lambda done: Requests(),
) -> Outcome:
    """Update the weights by global batch number `step`.

    Args:
        ask: Requests of this rank once `step + 1` steps are done. Ranks agree on them together with the check of the
            numbers: one small reduction and one look at the device per step.
    """
    place, plan, heartbeat = run.place, run.plan, run.place.heartbeat
    torch.manual_seed(model_seed(run.config.seed, step, place.rank))
    losses, faults = _accumulate(run, micro_batches, step, clock)
    total = torch.zeros((), device=place.device)
    for loss in losses:
        total += loss
    heartbeat.enter(Phase.AGREEING)
    agreed = _agree(run, total, len(faults), ask(step + 1))
    requests = Requests(bool(agreed.stop), bool(agreed.save))
    outcome = Outcome(total, bad_images=agreed.bad_images, faults=faults, requests=requests)
    heartbeat.enter(Phase.UPDATE)
    if agreed.bad_losses or agreed.bad_gradients:
        outcome.non_finite = NonFinite.LOSS if agreed.bad_losses else NonFinite.GRADIENT
        wrong = [i for i, loss in enumerate(losses) if not loss.isfinite()]
        outcome.suspects = [plan.first_slot(i, place.rank) + k for i in wrong for k in range(plan.micro)]
        run.optimizer.zero_grad()
    else:
        _update(run, step + 1)
    run.schedule.step_update(step + 1)
    return outcome


def _accumulate(
    run: Training, micro_batches: Iterator[Batch], step: int, clock: Clock
) -> tuple[list[torch.Tensor], list[SampleFault]]:
    """Gradients of a global batch; returns the share of each micro-batch in the loss, and what its images lack."""
    place, plan, heartbeat = run.place, run.plan, run.place.heartbeat
    epoch = step // run.data.steps_per_epoch
    losses: list[torch.Tensor] = []
    faults: list[SampleFault] = []
    for micro_step in range(plan.accumulation):
        heartbeat.enter(Phase.LOADING, step + 1, micro_step)
        with clock.waiting():
            batch = next(micro_batches)
        faults += batch.faults
        images, targets = (x.to(place.device, non_blocking=True) for x in (batch.images, batch.targets))
        images, targets = run.task.mix(images, targets, step, epoch, plan.first_slot(micro_step, place.rank))
        with _no_sync(run, last=micro_step == plan.accumulation - 1):
            heartbeat.enter(Phase.FORWARD)
            with run.autocast():
                logits = run.wrapped(images)
            # every micro-batch has the same size, so the mean of means is the mean over the global batch
            loss = run.task.loss(logits, targets) / plan.accumulation
            heartbeat.enter(Phase.BACKWARD)
            run.scaler.scale(loss).backward()
        losses.append(loss.detach())
    return losses, faults


def _agree(run: Training, loss: torch.Tensor, bad_images: int, requests: Requests) -> _Agreement:
    checks = [~loss.isfinite(), torch.zeros_like(loss, dtype=torch.bool)]
    # with a scaler, infinite gradients are its way of finding the scale, until the scale cannot be the reason any more
    if not run.scaler.is_enabled() or run.scaler.get_scale() < 1:
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        checks[1] = ~get_total_norm(gradients, math.inf).isfinite()  # not the 2-norm, whose squares overflow
    counts = torch.tensor([bad_images, *map(int, requests)], dtype=torch.int64, device=loss.device)
    return _Agreement(*run.place.sum(torch.cat([torch.stack(checks).long(), counts])).tolist())


def _no_sync(run: Training, last: bool) -> contextlib.AbstractContextManager[None]:
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
