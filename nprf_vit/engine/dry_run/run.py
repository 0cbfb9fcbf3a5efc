"""`--dry-run`: would this run fit, and how long would it take?"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timm.models import VisionTransformer

from nprf_vit.config.schema import Config
from nprf_vit.data.batch_plan import BatchPlan
from nprf_vit.engine.build import build_training
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.output.numbers import duration
from nprf_vit.engine.output.report import model_title
from nprf_vit.errors import RunError
from nprf_vit.models import PixelTransformer

from . import memory
from .memory_count import CannotCount, MemoryCount, count_memory
from .trials import Bench, Trial, at

Say = Callable[[str], None]
CPU_SECONDS = 60  # of steps, about


@dataclass(frozen=True)
class Run:
    """What a dry run has to know of the whole."""

    plan: BatchPlan
    parameters: int
    depth: int  # blocks, where the model has an argument for their number; else 1
    images: int
    steps_per_epoch: int


def dry_run(config: Config, place: Place) -> dict[str, Any]:
    """Build everything, run a few updates of one per-device batch each on synthetic images, and extrapolate.

    An accumulating run repeats the same forward and backward, so one micro-batch shows its memory and its speed. On a
    GPU the batch is halved until it fits. On a CPU, where the batch and often the model would take hours, smaller
    batches of a model with fewer blocks give the two slopes by which the time is extrapolated; memory is then counted.
    """

    def say(text: str) -> None:
        if place.is_main:
            print(text, flush=True)

    device = place.device
    threads = f' ({torch.get_num_threads()} threads)' if device.type == 'cpu' else ''
    begin = memory.in_use(device)
    say(f'dry run of {model_title(config)} on {place.world} x {device.type}{threads}')
    say(f'building the model; {gib(begin)} in use')
    config = replace(config, workers=0)  # synthetic images are made here
    if config.initial_checkpoint and not Path(config.initial_checkpoint).exists():
        say(f'initial_checkpoint {config.initial_checkpoint} is not here: a training run needs it, a dry run does not')
        config = replace(config, initial_checkpoint=None)
    run = _whole(config, place)
    say(f'{run.parameters / 1e6:.2f} M parameters; {gib(memory.in_use(device))} in use')
    say(str(run.plan))
    bench = Bench(config, place, say, run.depth, run.images)
    on_gpu = device.type != 'cpu'
    trials = (_on_gpu if on_gpu else _on_cpu)(bench, run, say)
    batch = trials[-1].batch if on_gpu else run.plan.micro
    images_per_s = batch * place.world / at(trials, batch, run.depth, 'seconds')
    extrapolated = (batch, run.depth) not in {(trial.batch, trial.depth) for trial in trials}
    counted = _count(config, place, say) if extrapolated else None
    growth = at(trials, batch, run.depth, 'memory') if counted is None else counted.total
    result = {
        'parameters': run.parameters,
        'memory_bytes': (0 if memory.is_separate(device) else begin) + int(growth),
        'images_per_s': images_per_s,
        'days': run.steps_per_epoch * config.epochs * config.global_batch / images_per_s / 86400,
        'extrapolated': extrapolated,
        'memory_count': counted,
    }
    _conclude(config, run, result, trials, batch, memory.available(device), say)
    return result


def _whole(config: Config, place: Place) -> Run:
    """Build all parts of the run once, which also finds mistakes in the configuration."""
    try:
        run = build_training(config, place, synthetic=True)
    except (MemoryError, RuntimeError, ValueError) as error:
        if not memory.ran_out(error):
            raise
        raise RunError(f'{config.model} itself does not fit into memory ({_room(place.device)})') from error
    takes_depth = isinstance(run.model, VisionTransformer | PixelTransformer)
    return Run(
        plan=run.plan,
        parameters=sum(p.numel() for p in run.model.parameters()),
        depth=len(run.model.blocks) if takes_depth else 1,
        images=run.data.images or run.data.steps_per_epoch * config.global_batch,
        steps_per_epoch=run.data.steps_per_epoch,
    )


def _count(config: Config, place: Place, say: Say) -> MemoryCount | None:
    """The memory of an update of the whole, batch and depth as configured; None where it cannot be counted."""
    memory.release(place.device)
    whole = replace(config, pretrained=False, initial_checkpoint=None)
    try:
        return count_memory(build_training(whole, place, synthetic=True))
    except CannotCount as error:
        say(f'memory cannot be counted ({error}): extrapolated as well')
        return None


def _on_gpu(bench: Bench, run: Run, say: Say) -> list[Trial]:
    """The batch of the configuration, or the half, or the half of that, until one fits."""
    batch = run.plan.micro
    while True:
        trial = bench.trial(batch, run.depth)
        if trial is not None:
            return [trial]
        if batch <= bench.smallest:
            raise RunError(
                f'{bench.config.model} does not fit: memory runs out with {batch} images ({_room(bench.place.device)})'
            )
        batch = max(bench.smallest, batch // 2)
        say(f'memory ran out: trying a batch of {batch} per device')


def _on_cpu(bench: Bench, run: Run, say: Say) -> list[Trial]:
    """Trials from which to read off an update of the run, the nearest to it that are to be had in a minute."""
    smallest, micro, depth = min(bench.smallest, run.plan.micro), run.plan.micro, run.depth
    probe = bench.trial(smallest, 1)
    if probe is None:
        left = _room(bench.place.device)
        raise RunError(
            f'{bench.config.model} does not fit: memory runs out with {smallest} images and one block ({left})'
        )
    room, widest = bench.agreed_room(memory.available(bench.place.device)), probe

    def obstacle(*sizes: tuple[int, int]) -> str:
        """What speaks against trials of (batch, depth), judged by the probe; both estimates err on the high side."""
        factors = [batch / probe.batch * blocks for batch, blocks in sizes]
        if probe.seconds * 2 * sum(factors) > CPU_SECONDS:
            return f'an update of {sizes[-1][0]} images may take {significant(probe.seconds * factors[-1])} s here'
        factor = sizes[-1][0] / widest.batch * sizes[-1][1]
        return f'{sizes[-1][0]} images may not fit into {gib(room)}' if widest.memory * factor > room else ''

    if 'may not fit' in obstacle((micro, depth)):
        # what a process needs for any batch is much of so small a one
        widest = bench.trial(min(micro, 8 * smallest), 1) or probe
    # the run itself; two batches; two batches of one and two blocks; one image of one and two blocks
    plans = [[(micro, depth)], [(smallest, depth), (2 * smallest, depth)]]
    plans += [[(smallest, 2), (2 * smallest, 1), (2 * smallest, 2)], [(smallest, 2)]] if depth > 2 else []
    words = ['smaller batches, and the rest by extrapolation', 'fewer blocks as well', 'one batch only']
    for number, sizes in enumerate(plans):
        reason = obstacle(*sizes)
        if not reason:
            done = [trial for trial in (bench.trial(*size) for size in sizes) if trial is not None]
            if len(done) == len(sizes):
                return [probe, *done] if number > 1 else done
            reason = 'memory ran out'
        if number < len(plans) - 1:
            say(f'{reason}: {words[number]}')
    return [probe]


def _conclude(
    config: Config, run: Run, result: dict[str, Any], trials: list[Trial], batch: int, room: int | None, say: Say
) -> None:
    label = bound = ''
    if result['extrapolated']:
        label = ' (extrapolated)'
        batches, depths = sorted({t.batch for t in trials}), sorted({t.depth for t in trials})
        # through a single point there is only the line in proportion, which takes the weights for a part of the batch
        bound = 'roughly ' if depths != [run.depth] else ''
        bound = 'at most ' if len(batches) == 1 or depths == [1] != [run.depth] else bound
        blocks = f' with {_listed(depths)} of {run.depth} blocks' if depths != [run.depth] else ''
        sizes = f'{"a batch" if len(batches) == 1 else "batches"} of {_listed(batches)}'
        say(f'not measured but extrapolated from {sizes}{blocks}:')
    need, counted = result['memory_bytes'], result['memory_count']
    if counted is None:
        say(f'memory per device: {bound}{gib(need)} at its peak with a batch of {batch}{label}')
    else:
        say(f'memory per device: about {gib(need)} at its peak with a batch of {batch} (counted tensor by tensor)')
        parts = {**counted._asdict(), 'the process itself': need - counted.total}
        say('  ' + ', '.join(f'{name} {gib(size)}' for name, size in parts.items()))
    if batch < run.plan.micro:
        say(f'a batch of {run.plan.micro} does not fit: --set batch_size={batch}')
    elif room is not None and result['extrapolated'] and need > room:
        say(f'that is more than the {gib(room)} left here: lower batch_size, or set grad_checkpointing: true')
    rate = f'{significant(result["images_per_s"])} images/s'
    say(f'{rate} on synthetic images, without loading or evaluation{label}')
    days = result['days']
    other = duration(days * 86400) if days < 2 else f'{days * 24:,.0f} hours'
    total = f'{config.epochs} epochs x {run.steps_per_epoch} steps'
    say(f'estimated {significant(days)} days ({other}) for {total}{label}')


def significant(value: float) -> str:
    """Three digits that count, and no exponent among ordinary numbers."""
    return f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'


def gib(number: float) -> str:
    return f'{number / 2**30:.2f} GiB'


def _listed(numbers: list[int]) -> str:
    return ' and '.join(map(str, numbers))


def _room(device: torch.device) -> str:
    room = memory.available(device)
    return 'nobody says how much there is' if room is None else f'{gib(room)} left'
