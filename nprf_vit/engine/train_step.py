"""One optimizer update from the micro-batches of one global batch, or none if its numbers have gone bad.

A step has three parts: gradients, the update, and what the host learns of both. The host reads one small vector per
step. Where the optimizer can leave out an update by itself (`Training.gates_on_device`), that vector is copied while
the device goes on, and read when the gradients of the next step are under way: nobody waits. What a step does to
weights, files and counters is the same either way, as the next update is made only after the step is finished.
"""

import contextlib
import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
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
from .transfer import HostCopy, to_device


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


class Agreement(NamedTuple):
    """What ranks tell each other in a step, summed over them."""

    bad_losses: float
    bad_gradients: float
    loss: float
    bad_images: float
    stop: float
    save: float


@dataclass
class Gradients:
    """Those of a global batch are in the parameters; this is the rest."""

    step: int
    losses: list[torch.Tensor]  # each micro-batch's share of this rank's mean, on the device
    faults: list[SampleFault]  # of this rank's images


@dataclass
class PendingStep:
    """An update under way, or left out."""

    gradients: Gradients
    lr: float
    agreement: HostCopy


@dataclass
class Outcome:
    """What came of a step, the same on all ranks except where it says so."""

    loss: float  # mean over ranks
    lr: float
    non_finite: NonFinite | None = None  # on some rank: no update was made
    suspects: list[int] = field(default_factory=list)  # slots of this rank's micro-batches with a non-finite loss
    bad_images: int = 0  # how many could not be read or augmented, on all ranks
    faults: list[SampleFault] = field(default_factory=list)  # those of this rank
    requests: Requests = Requests()  # each true when it was on some rank


def train_step(
    run: Training,
    micro_batches: Iterator[Batch],
    step: int,
    clock: Clock,
    ask: Callable[[int], Requests] = lambda done: Requests(),
) -> Outcome:
    """A step from its data to its outcome, which the host waits for."""
    gradients = compute_gradients(run, micro_batches, step, clock)
    return finish_step(run, start_update(run, gradients, ask(step + 1)))


def compute_gradients(run: Training, micro_batches: Iterator[Batch], step: int, clock: Clock) -> Gradients:
    """Forward and backward of global batch number `step`."""
    place, plan, heartbeat = run.place, run.plan, run.place.heartbeat
    torch.manual_seed(model_seed(run.config.seed, step, place.rank))
    epoch = step // run.data.steps_per_epoch
    gradients = Gradients(step, [], [])
    for micro_step in range(plan.accumulation):
        heartbeat.enter(Phase.LOADING, step + 1, micro_step)
        with clock.waiting():
            batch = next(micro_batches)
        gradients.faults += batch.faults
        images, targets = run.transfer(batch)
        images, targets = run.task.mix(images, targets, step, epoch, plan.first_slot(micro_step, place.rank))
        with _no_sync(run, last=micro_step == plan.accumulation - 1):
            heartbeat.enter(Phase.FORWARD)
            with run.autocast():
                logits = run.wrapped(images)
            # every micro-batch has the same size, so the mean of means is the mean over the global batch
            loss = run.task.loss(logits, targets) / plan.accumulation
            heartbeat.enter(Phase.BACKWARD)
            run.scaler.scale(loss).backward()
        gradients.losses.append(loss.detach())
    return gradients


def start_update(run: Training, gradients: Gradients, requests: Requests) -> PendingStep:
    """Update the weights, unless a loss or a gradient is not finite on some rank.

    Args:
        requests: Of this rank. Ranks agree on them together with the check of the numbers: one small reduction.
    """
    run.place.heartbeat.enter(Phase.AGREEING)
    values = _agree(run, gradients, requests)
    agreement, lr = HostCopy(values), run.schedule.lr
    run.place.heartbeat.enter(Phase.UPDATE)
    if run.gates_on_device:
        _clip_gradients(run)
        run.optimizer.found_inf = (values[:2].sum() > 0).float()
        run.optimizer.step()
        del run.optimizer.found_inf
    elif not _is_bad(agreement.read()):
        if run.config.clip_grad is not None:
            run.scaler.unscale_(run.optimizer)
        _clip_gradients(run)
        run.scaler.step(run.optimizer)
        run.scaler.update()
    run.optimizer.zero_grad()
    run.schedule.step_update(gradients.step + 1)
    return PendingStep(gradients, lr, agreement)


def finish_step(run: Training, pending: PendingStep) -> Outcome:
    """What came of a step. Must be called before the next update: the moving average takes in the present weights."""
    agreed = Agreement(*pending.agreement.read())
    plan, gradients = run.plan, pending.gradients
    outcome = Outcome(
        agreed.loss / run.place.world,
        pending.lr,
        bad_images=int(agreed.bad_images),
        faults=gradients.faults,
        requests=Requests(bool(agreed.stop), bool(agreed.save)),
    )
    if _is_bad(agreed):
        outcome.non_finite = NonFinite.LOSS if agreed.bad_losses else NonFinite.GRADIENT
        wrong = [i for i, loss in enumerate(gradients.losses) if not loss.isfinite()]
        outcome.suspects = [plan.first_slot(i, run.place.rank) + k for i in wrong for k in range(plan.micro)]
    elif run.ema is not None:
        run.ema.update(run.model, step=gradients.step + 1)
    return outcome


def _is_bad(values: Sequence[float]) -> bool:
    agreed = Agreement(*values)
    return bool(agreed.bad_losses or agreed.bad_gradients)


def _agree(run: Training, gradients: Gradients, requests: Requests) -> torch.Tensor:
    """An Agreement on the device, in float64 so that a sum over ranks rounds a loss as little as can be."""
    device = run.place.device
    loss = torch.zeros((), device=device)
    for share in gradients.losses:
        loss += share
    found = [p.grad for p in run.model.parameters() if p.grad is not None]
    bad_gradient = ~get_total_norm(found, math.inf).isfinite()  # not the 2-norm, whose squares overflow
    if run.scaler.is_enabled():
        # infinite gradients are its way of finding the scale, until the scale cannot be the reason any more
        bad_gradient &= run.scaler.scale(torch.ones((), device=device)) < 1
    kind = torch.float32 if device.type == 'mps' else torch.float64  # MPS has no float64, and no second rank
    numbers = torch.stack([(~loss.isfinite()).to(kind), bad_gradient.to(kind), loss.to(kind)])
    counts = to_device(torch.tensor([len(gradients.faults), *map(int, requests)], dtype=kind), device)
    return run.place.sum(torch.cat([numbers, counts]))


def _no_sync(run: Training, last: bool) -> contextlib.AbstractContextManager[None]:
    """Exchange gradients once per update, with the last micro-batch."""
    if last or run.place.world == 1:
        return contextlib.nullcontext()
    return getattr(run.wrapped, '_orig_mod', run.wrapped).no_sync()


def _clip_gradients(run: Training) -> None:
    config = run.config
    if config.clip_grad is not None:
        parameters = model_parameters(run.model, exclude_head='agc' in config.clip_mode)
        dispatch_clip_grad(parameters, config.clip_grad, mode=config.clip_mode)
