"""What the three language examples share: the order of samples, the loop, and resuming.

Optimizer, schedule, autocast, DDP, process group and checkpoint files are the package's own. Samples and random numbers
of a step are functions of (seed, step), so a run that is continued goes on where it was.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from timm.scheduler.poly_lr import PolyLRScheduler
from torch import nn

from examples.language.settings import S, Settings, parse
from nprf_vit.command import run_command
from nprf_vit.data.seeding import derive_seed
from nprf_vit.engine.checkpoint.file import FORMAT, LAST, checkpoints, newest_good, read_checkpoint, save_checkpoint
from nprf_vit.engine.distributed.ddp import wrap_model
from nprf_vit.engine.distributed.process_group import Place, process_group
from nprf_vit.engine.distributed.watchdog import Phase
from nprf_vit.engine.lr_schedule import InverseSqrtLR, LRSchedule
from nprf_vit.engine.optimizer import build_autocast, build_optimizer, build_scaler
from nprf_vit.engine.output.atomic_file import replace_file
from nprf_vit.engine.preemption import Preemption
from nprf_vit.errors import Exit, InputError, RunError, exit_with
from nprf_vit.layers import RelPosBias

MAX_SKIPPED = 10  # non-finite steps in a row at which a run stops
Batch = tuple[torch.Tensor, ...]


class TextModel(nn.Module):
    """A model whose relative position biases are not decayed, which timm's optimizers ask it for."""

    def no_weight_decay(self) -> set[str]:
        biases = [(name, module) for name, module in self.named_modules() if isinstance(module, RelPosBias)]
        return {f'{name}.{own}' for name, module in biases for own, _ in module.named_parameters()}


class Task(Protocol):
    """What is learned. `model(*batch)` returns the sum of the losses of a batch."""

    model: TextModel

    def share(self, step: int, part: int, parts: int) -> tuple[Batch, int]:
        """The part-th of the shares of a step's batch, and how many losses it sums up."""

    def evaluate(self, split: str, place: Place) -> dict[str, float]:
        """Metrics on 'valid' or 'test'."""


def order(seed: int, count: int, first: int, number: int) -> np.ndarray:
    """Indices first … first+number of an endless sequence that holds each of `count` samples once per epoch."""
    epochs = range(first // count, (first + number - 1) // count + 1)
    start = first - epochs[0] * count
    return np.concatenate([_epoch_order(seed, count, epoch) for epoch in epochs])[start : start + number]


@functools.lru_cache(maxsize=2)
def _epoch_order(seed: int, count: int, epoch: int) -> np.ndarray:
    return np.random.default_rng(derive_seed(seed, 'order', epoch)).permutation(count)


def part_of(chosen: np.ndarray, part: int, parts: int) -> np.ndarray:
    """The part-th of a batch's shares."""
    if parts > len(chosen):
        raise InputError(f'a batch of {len(chosen)} cannot be divided into {parts} parts (processes · accumulate)')
    return chosen[part::parts]


def read_lines(path: Path, expected: str) -> Iterator[str]:
    """The lines of a text file; what is wrong with it is told in one line, with what was expected there."""
    if not path.is_file():
        raise InputError(f'no file {path}: expected {expected}')
    empty = True
    try:
        with open(path, encoding='utf-8', newline='\n') as stream:  # U+2028 and such do not end a line
            for line in stream:
                empty = empty and not line.strip()
                yield line.rstrip('\r\n')
    except UnicodeDecodeError as error:
        raise InputError(f'{path} is not UTF-8 ({error.reason}): expected {expected}') from None
    if empty:
        raise InputError(f'{path} is empty: expected {expected}')


def keep_ids(kept: Path, pieces: Callable[[], Iterable[list[int]]]) -> np.ndarray:
    """The numbers of a text, which take long to make: made once, and kept in a file."""
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_file(kept, lambda stream: [stream.write(np.array(ids, dtype=np.int32).tobytes()) for ids in pieces()])
    return np.memmap(kept, dtype=np.int32, mode='r')


def build_schedule(settings: Settings, optimizer: torch.optim.Optimizer) -> LRSchedule:
    if settings.decay == 'inverse_sqrt':
        return LRSchedule(InverseSqrtLR(optimizer, settings.warmup_steps, warmup_lr=0.0))
    warmup = {'warmup_t': settings.warmup_steps, 'warmup_lr_init': 0.0, 'warmup_prefix': True}
    falling = max(2, settings.steps - settings.warmup_steps)  # of a single step timm says that nothing will change
    return LRSchedule(PolyLRScheduler(optimizer, t_initial=falling, power=1.0, t_in_epochs=False, **warmup))


class Trainer:
    """A run: model, optimizer, schedule and where it is. `train` goes on to the last step."""

    def __init__(self, task: Task, settings: Settings, place: Place) -> None:
        self.task, self.settings, self.place = task, settings, place
        config = settings.optimization()
        task.model.to(place.device)
        self.optimizer = build_optimizer(config, task.model)
        self.schedule = build_schedule(settings, self.optimizer)
        self.scaler, self.autocast = build_scaler(config, place.device), build_autocast(config, place.device)
        self.wrapped = wrap_model(config, task.model, place)
        self.step, self.skipped, self.folder = 0, 0, Path(settings.output)

    def resume(self) -> None:
        """Go on from the newest good checkpoint of the output folder."""
        path, content, bad = newest_good(
            self.folder, lambda content, origin: check_alike(content, self.settings, origin)
        )
        for fault in bad.values():
            self.say(f'passed over: {fault}')
        if content is None:
            raise InputError(f'nothing to resume: {self.folder} has no {LAST}')
        self.task.model.load_state_dict(content['state_dict'])
        self.optimizer.load_state_dict(content['optimizer'])
        self.scaler.load_state_dict(content['scaler'])
        self.step = content['step']
        self.schedule.step_update(self.step)
        self.say(f'resumed from {path} at step {self.step}')

    def save(self) -> None:
        self.place.heartbeat.enter(Phase.SAVING)
        if self.place.is_main:
            parts = {'optimizer': self.optimizer.state_dict(), 'scaler': self.scaler.state_dict()}
            save_checkpoint({**weights(self.task.model, self.settings, self.step), **parts}, self.folder / LAST, keep=2)
        self.place.barrier()

    def train(self, stop: Callable[[int], bool] = lambda step: False) -> bool:
        """To the last step, or until `stop` says so; returns whether it got there. Saves either way."""
        begin, total, count = time.perf_counter(), 0.0, 0
        while self.step < self.settings.steps:
            loss, losses = self.update()
            total, count = total + loss, count + losses
            if self.step % self.settings.log_interval == 0:
                pace = self.settings.log_interval / (time.perf_counter() - begin)
                self.say(f'step {self.step}: loss {total / count:.4f}, lr {self.schedule.lr:.2e}, {pace:.2f} steps/s')
                begin, total, count = time.perf_counter(), 0.0, 0
            asked = self.place.any(stop(self.step))
            if asked or self.step % self.settings.save_interval == 0 or self.step == self.settings.steps:
                self.save()
            if asked and self.step < self.settings.steps:
                self.say(f'stopped at step {self.step}; --resume continues')
                return False
            if self.settings.eval_interval and self.step % self.settings.eval_interval == 0:
                self.evaluate('valid')
        return True

    def update(self) -> tuple[float, int]:
        """One step: the gradient of the mean loss over the whole batch, whatever share each process has of it."""
        place, pieces = self.place, self.settings.accumulate
        self.task.model.train()
        torch.manual_seed(derive_seed(self.settings.seed, 'model', self.step, place.rank))
        place.heartbeat.enter(Phase.LOADING, self.step)
        parts = range(place.rank * pieces, (place.rank + 1) * pieces)
        shares = [self.task.share(self.step, part, place.world * pieces) for part in parts]
        sums = torch.zeros(2, dtype=torch.float64)
        sums[1] = sum(count for _, count in shares)
        total = float(place.sum(sums[1].to(place.device, torch.float32)))
        place.heartbeat.enter(Phase.FORWARD)
        for number, (batch, _) in enumerate(shares):
            with self._without_sync(number < pieces - 1), self.autocast():
                loss = self.wrapped(*(x.to(place.device) for x in batch))
            self.scaler.scale(loss * (place.world / total)).backward()  # DDP takes the mean over processes
            sums[0] += float(loss.detach())
        self._apply()
        self.step += 1
        self.schedule.step_update(self.step)
        return float(place.sum(sums[0].to(place.device, torch.float32))), round(total)

    @contextlib.contextmanager
    def _without_sync(self, local: bool) -> Iterator[None]:
        with self.wrapped.no_sync() if local and self.place.world > 1 else contextlib.nullcontext():
            yield

    def _apply(self) -> None:
        """The update, left out where a gradient is not finite."""
        self.place.heartbeat.enter(Phase.UPDATE)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.task.model.parameters(), self.settings.clip_grad or math.inf)
        self.skipped = 0 if bool(norm.isfinite()) else self.skipped + 1
        if self.skipped >= MAX_SKIPPED:
            raise RunError(f'the gradient was not finite in {MAX_SKIPPED} steps in a row, the last of them {self.step}')
        if not self.skipped:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, split: str) -> dict[str, float]:
        self.place.heartbeat.enter(Phase.EVALUATION)
        self.task.model.eval()
        with torch.inference_mode(), self.autocast():
            metrics = self.task.evaluate(split, self.place)
        self.say(f'step {self.step}, {split}: ' + ', '.join(f'{name} {value:.4f}' for name, value in metrics.items()))
        return metrics

    def say(self, text: str) -> None:
        if self.place.is_main:
            print(text, flush=True)


def weights(model: nn.Module, settings: Settings, step: int) -> dict[str, Any]:
    """What is needed to use a model."""
    return {'format': FORMAT, 'config': dataclasses.asdict(settings), 'step': step, 'state_dict': model.state_dict()}


def check_alike(content: dict[str, Any], settings: Settings, origin: str) -> None:
    """Raise unless a checkpoint belongs to a run with these settings."""
    there, fixed = content.get('config', {}), [f for f in dataclasses.fields(settings) if not f.metadata['free']]
    pairs = [(f.name, there.get(f.name), getattr(settings, f.name)) for f in fixed]
    changed = [f'{name} {old} there, {new} here' for name, old, new in pairs if old != new]
    if changed:
        raise InputError(f'{origin} belongs to a run with other settings: {"; ".join(changed[:5])}')


def of_checkpoint(settings: S) -> tuple[S, dict[str, torch.Tensor]]:
    """The settings with which the model in the output folder was trained, and its weights."""
    content = read_checkpoint(Path(settings.output) / LAST)
    fixed = {f.name for f in dataclasses.fields(settings) if not f.metadata['free']}
    trained = {name: value for name, value in content['config'].items() if name in fixed}
    return dataclasses.replace(settings, **trained), content['state_dict']


def train_task(
    make_task: Callable[[S, Place], Task],
    settings: S,
    place: Place,
    resume: bool = False,
    stop: Callable[[int], bool] = lambda step: False,
    splits: tuple[str, ...] = ('valid', 'test'),
) -> dict[str, float] | None:
    """Train, then measure; None if it was stopped before."""
    folder = Path(settings.output)
    if not resume and checkpoints(folder):
        raise InputError(f'{folder} has a checkpoint: --resume continues it, or choose another --output')
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f'cannot write to the output folder {folder}: {error}') from None
    torch.manual_seed(derive_seed(settings.seed, 'weights'))
    trainer = Trainer(make_task(settings, place), settings, place)
    if resume:
        trainer.resume()
    if not trainer.train(stop):
        return None
    results = {split: trainer.evaluate(split) for split in splits}
    return {f'{split}_{name}': value for split, found in results.items() for name, value in found.items()}


def run(
    about: str,
    presets: Mapping[str, S],
    commands: Mapping[str, Callable[[S, Place, bool, Preemption], object]],
    argv: list[str] | None = None,
) -> int:
    """A command line: the package's exit codes, and one line for a mistake. A command that returns None was stopped."""

    def main() -> int:
        try:
            command, settings, resume = parse(about, presets, tuple(commands), argv)
            with process_group(settings.device, settings.threads or None) as place, Preemption() as stop:
                return Exit.PREEMPTED if commands[command](settings, place, resume, stop) is None else Exit.DONE
        except (InputError, RunError) as error:
            return exit_with(error)

    return run_command(main)
