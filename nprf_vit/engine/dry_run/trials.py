"""A few updates of a run at other batch sizes and depths, and lines through what they cost."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from nprf_vit.config.schema import Config
from nprf_vit.data.batch import Batch, collate
from nprf_vit.engine.build import Training, build_training
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.tasks.registry import task_of
from nprf_vit.engine.train_step import Clock, train_step

from . import memory

_ENOUGH_SECONDS, _MOST_STEPS = 1.0, 5  # of timed updates
_LONG_SECONDS = 10.0  # so long an update that what the first one does besides is little of it


class Trial(NamedTuple):
    """What an update of one per-device batch cost on the slowest rank."""

    batch: int
    depth: int
    seconds: float
    memory: float  # bytes at the peak above what was in use before


class Bench:
    """Runs trials, each with a model, an optimizer and data of its own; all ranks together.

    Args:
        say: Prints a line on the main rank.
        depth: Blocks of the whole model.
        images: Size of the training set.
    """

    def __init__(self, config: Config, place: Place, say: Callable[[str], None], depth: int, images: int) -> None:
        self.config, self.place, self.say, self.depth, self.images = config, place, say, depth, images
        self.smallest = task_of(config).smallest_batch

    def trial(self, batch: int, depth: int) -> Trial | None:
        """Time and memory of an update; None if memory ran out on some rank."""
        blocks = f', {depth} of {self.depth} blocks' if depth != self.depth else ''
        self.say(f'trying a batch of {batch} per device{blocks}')
        memory.release(self.place.device)
        before = memory.in_use(self.place.device)
        memory.reset_peak(self.place.device)
        seconds = None
        try:
            seconds = self._updates(self._scaled(batch, depth))
        except (MemoryError, RuntimeError, ValueError) as error:
            if not memory.ran_out(error):
                raise
        if self.place.any(seconds is None):
            self.say('  memory ran out')
            return None
        used = memory.peak(self.place.device) - (0 if memory.is_separate(self.place.device) else before)
        seconds, used = (max(values) for values in zip(*self.place.gather((seconds, used))))
        self.say(f'  {seconds:.3g} s per update, {used / 2**30:.2f} GiB')
        return Trial(batch, depth, seconds, used)

    def agreed_room(self, room: int | None) -> float:
        """What is left on the rank that has least, so that all ranks decide alike."""
        return min(self.place.gather(math.inf if room is None else room))

    def _scaled(self, batch: int, depth: int) -> Config:
        config = self.config
        kwargs = config.model_kwargs if depth == self.depth else {**config.model_kwargs, 'depth': depth}
        return replace(
            config,
            batch_size=batch,
            global_batch=batch * self.place.world,
            mixup_block=math.gcd(config.mixup_block, batch) if config.mixes else config.mixup_block,
            train_images=self.images,
            model_kwargs=kwargs,
            pretrained=False,  # weights do not change the time, and those of the whole do not fit a part
            initial_checkpoint=None,
        )

    def _updates(self, config: Config) -> float:
        """Seconds of an update: the median of a few after a first one, which allocates and tunes, or that if long."""
        run = build_training(config, self.place, synthetic=True)
        run.wrapped.train()
        samples = run.task.synthetic_samples(config, run.model)
        batch = collate([samples[0, i, 0] for i in range(run.plan.micro)])
        if self.place.world > 1:
            self._try_alone(run, batch)
        times: list[float] = []
        while len(times) < 2 or (sum(times[1:]) < _ENOUGH_SECONDS and len(times) <= _MOST_STEPS):
            batches = iter([Batch(batch.images.clone(), batch.targets.clone())])  # mixing writes into them
            self._wait()
            begin = time.perf_counter()
            train_step(run, batches, len(times), Clock())
            self._wait()
            times.append(max(self.place.gather(time.perf_counter() - begin)))
            if times[0] > _LONG_SECONDS and not config.torchcompile:
                return times[0]
        return statistics.median(times[1:])

    def _try_alone(self, run: Training, batch: Batch) -> None:
        """Forward and backward without the other ranks: who ran out of memory would leave them waiting."""
        failed = None
        try:
            device = self.place.device
            images, targets = run.task.mix(batch.images.clone().to(device), batch.targets.to(device), 0, 0, 0)
            with run.autocast():
                logits = run.model(images)
            run.task.loss(logits, targets).backward()
        except (MemoryError, RuntimeError) as error:
            if not memory.ran_out(error):
                raise
            failed = str(error)
        run.optimizer.zero_grad()
        if self.place.any(failed is not None):
            raise MemoryError(failed or 'on another rank')

    def _wait(self) -> None:
        if self.place.device.type != 'cpu':
            torch.accelerator.synchronize(self.place.device)


def at(trials: list[Trial], batch: int, depth: int, cost: str) -> float:
    """A cost at a batch and a depth: along lines over the batch at each depth, then along one over depth."""
    least = 0.25 if cost == 'seconds' else 0.0
    by_depth = {}
    for blocks in {trial.depth for trial in trials}:
        points = {trial.batch: getattr(trial, cost) for trial in trials if trial.depth == blocks}
        by_depth[blocks] = _along_line(points, batch, least)
    return _along_line(by_depth, depth, least)


def _along_line(points: dict[int, float], x: int, least: float) -> float:
    """The value at x of a line through the two outermost points, or through the origin and a single one.

    Noise may turn a line upside down. Costs grow with x, at most in proportion, so a slope is kept to
    [least, 1] times that of the line through the origin.
    """
    if x in points:
        return points[x]
    first, last = min(points), max(points)
    proportional = points[last] / last
    slope = proportional
    if first != last:
        slope = (points[last] - points[first]) / (last - first)
        slope = min(max(slope, least * proportional), proportional)
    return points[last] + slope * (x - last)
