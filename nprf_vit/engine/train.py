"""A training run from its configuration to its last line."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nprf_vit.config.schema import Config
from nprf_vit.engine.checkpoint.file import WrongCheckpoint
from nprf_vit.engine.checkpoint.resume import ResumePoint, find_checkpoint, restarted
from nprf_vit.engine.checkpoint.state import Progress, restore
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.distributed.watchdog import Phase
from nprf_vit.engine.output.folder import Output, check_output, check_space
from nprf_vit.engine.output.metric_loggers import check_loggers, open_loggers
from nprf_vit.engine.output.report import model_title

from ..data.samples import EvalSamples
from ..errors import first_line
from ..terminal import boxed, coloured
from .build import Training, build_training
from .hard_images import describe, write_hard_images
from .loss_meter import LossMeter
from .output import curves
from .run_report.page import NAME, write_report
from .train_loop import Loop


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
        resume: 'auto' for the folder's newest good checkpoint if it has one, or a checkpoint file.
    """
    output = Output(folder)
    with contextlib.ExitStack() as stack:
        place.from_main(lambda: output.hold(stack))
        if restarted(folder, place):
            resume = 'auto'
        check_output(folder, config, resume)
        check_loggers(config)
        run, meter, progress, found = _begin(config, place, folder, resume)
        place.barrier()  # every rank has looked into the folder before one writes to it
        messages = place.from_main(lambda: _prepare(run, progress, output, found, stack))
        loop = Loop(run, progress, meter, output, should_stop)
        loop.saver.last_step = progress.step if found.content else None
        for text in (*messages, _opening(run, progress, folder)):
            loop.report.say(text)
        if len(progress.history) == config.epochs:
            steps = f'{config.epochs} epochs, {progress.step} steps'
            loop.report.say(f'{found.path} is finished: {steps}; nothing left to do')
        if len(progress.history) < config.epochs:
            run.warm_up()
        if not loop.go():
            loop.report.say(f'stopped at step {progress.step}; {loop.saver.newest()}; continue with --resume auto')
            return None
        _write_report(loop, place)
    loop.report.say(boxed(_closing(run, progress, folder), sys.stdout))
    return progress.history[-1]


def _write_report(loop: Loop, place: Place) -> None:
    """report.html, and what it shows of the last evaluation. The run is over and saved: a failure is one line."""
    answers = [] if loop.hard is None else loop.hard.gather(place)  # all ranks
    if not place.is_main:
        return
    folder = loop.output.folder
    try:
        loop.output.lock.check()
        evaluation = loop.run.evaluation
        samples = getattr(evaluation and evaluation.batches, 'dataset', None)
        if loop.hard is not None and answers and isinstance(samples, EvalSamples):
            write_hard_images(folder, describe(answers, samples, loop.run.model, loop.hard))
        write_report(folder)
    except Exception as error:
        loop.report.say(f'no {folder / NAME}: {type(error).__name__}: {first_line(error)}')


def _begin(
    config: Config, place: Place, folder: Path, resume: str | None
) -> tuple[Training, LossMeter, Progress, ResumePoint]:
    """A run at its beginning, or where its newest checkpoint left it that fits together; all ranks come to the same."""
    wrong: dict[Path, str] = {}
    while True:
        found = find_checkpoint(folder, resume, config, place, wrong)
        content = found.content or {}
        place.heartbeat.enter(Phase.STARTING)  # opening a large data set takes its time
        try:
            run = build_training(config, place, weights=content.get('state_dict'), origin=found.path)
            place.heartbeat.enter(Phase.STARTING)
            meter = LossMeter()
            progress = restore(run, meter, content, found.path) if content else Progress()
            return run, meter, progress, found
        except WrongCheckpoint as error:
            if resume != 'auto' or not content:
                raise
            wrong[Path(found.path)] = str(error)


def _prepare(
    run: Training, progress: Progress, output: Output, found: ResumePoint, stack: contextlib.ExitStack
) -> list[str]:
    """The output folder, ours alone, as it was at the checkpoint and with room for the next; returns messages."""
    messages = output.open(run.config, run.place.world, stack)
    check_space(output.folder, _checkpoint_bytes(run))
    messages += output.continue_from(progress.step, progress.history, found.passed_over)
    output.loggers = open_loggers(run.config, output.folder, progress.step)
    if output.biases is not None and not progress.step:
        output.biases.add(run.model, step=0, epoch=0)
    return messages


def _checkpoint_bytes(run: Training) -> int:
    """At least: weights, their average, and Adam's two moments; an optimizer with less is not far below."""
    weights = sum(p.numel() * p.element_size() for p in run.model.state_dict().values())
    return weights * (3 if run.ema is None else 4)


def _opening(run: Training, progress: Progress, folder: Path) -> str:
    parameters = sum(p.numel() for p in run.model.parameters()) / 1e6
    title = coloured(model_title(run.config), sys.stdout, 'bold')
    lines = [
        f'{title}: {parameters:.2f} M parameters on {run.place.world} x {run.place.device.type}',
        f'{run.plan}; {run.data.steps_per_epoch} steps per epoch, {run.config.epochs} epochs; output in {folder}',
    ]
    if run.data.is_stream:
        lines.append(f'{run.config.dataset} is read in order: checkpoints and resume at epoch boundaries only')
    if not curves.available:
        lines.append('matplotlib is not installed: no curves.png (install nprf_vit[plot])')
    if progress.step and len(progress.history) < run.config.epochs:
        epoch, step = divmod(progress.step, run.data.steps_per_epoch)
        lines.append(f'continuing after step {progress.step} (epoch {epoch + 1}, {step} steps into it)')
    return '\n'.join(lines)


def _closing(run: Training, progress: Progress, folder: Path) -> str:
    best, name = progress.best, run.config.eval_metric
    lines = [run.task.results_table(run.config, progress.history[-1])]
    if progress.skipped.total:
        lines.append(f'{progress.skipped.total} steps were skipped for non-finite numbers: skipped_steps.jsonl')
    if progress.bad_images:
        lines.append(f'{len(progress.bad_images)} training images could not be read: bad_images.csv')
        lines += [f'  {text}' for _, text in sorted(progress.bad_images.items())]
    if progress.failed_augmentations:
        lines.append(f'{progress.failed_augmentations} augmentations failed: bad_images.csv has the first of them')
    if best:
        reached = coloured(f'best {name} {best[name]:.4g}', sys.stdout, 'green')
        lines.append(f'{reached} after epoch {best["epoch"]}; weights in {folder / "best.pt"}')
    return '\n'.join(lines)
