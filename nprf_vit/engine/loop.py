"""The training loop: epochs of steps, evaluation after each, checkpoints, and an exact way back in."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import BadImage, RunError
from .build import Training
from .evaluate import evaluate
from .faults import Faults
from .line_log import SkipLog, StepLog
from .meter import LossMeter
from .report import Reporter
from .saving import Saver
from .state import Progress, run_state, weights_state
from .step import Clock, Outcome, train_step


class Loop:
    """A run under way.

    Args:
        should_stop: asked after every step and during evaluation, with the number of steps done; when it says yes on
            one rank, all ranks write a checkpoint and leave. Preemption hooks in here.
    """

    def __init__(
        self,
        run: Training,
        progress: Progress,
        meter: LossMeter,
        folder: Path,
        should_stop: Callable[[int], bool] | None = None,
    ):
        self.run, self.progress, self.meter, self.should_stop = run, progress, meter, should_stop
        place, steps = run.place, run.data.steps_per_epoch
        self.report = Reporter(run.config, folder, run.total_steps, steps, progress.step, place.is_main)
        self.log = StepLog(folder / 'steps.csv', progress.step) if place.is_main else None
        skips = SkipLog(folder / 'skipped_steps.jsonl', progress.step) if place.is_main else None
        self.faults = Faults(run, progress, folder, skips)
        logs = [log for log in (self.log, skips) if log is not None]
        self.saver = Saver(run.config, place, folder, logs, self.report.say)
        self.epoch_clock, self.interval_clock = Clock(), Clock()

    def go(self) -> bool:
        """Train to the end; False if asked to stop on the way."""
        self.report.attempt(self.faults.write)  # as of the checkpoint
        try:
            while len(self.progress.history) < self.run.config.epochs:
                if not self._train_epoch() or not self._finish_epoch():
                    return False
            return True
        finally:
            self.run.place.pulse.enter('ending')
            self.report.close()

    def _train_epoch(self) -> bool:
        run, epoch = self.run, len(self.progress.history)
        first = self.progress.step - epoch * run.data.steps_per_epoch
        run.wrapped.train()
        self.report.start_epoch(epoch, first)
        self.epoch_clock, self.interval_clock, self.timed_steps = Clock(), Clock(), run.data.steps_per_epoch - first
        if not self.timed_steps:
            return True  # stopped between the epoch's last step and its evaluation
        batches = run.data.epoch(epoch, first)
        return all(self._step(batches, epoch) for _ in range(first, run.data.steps_per_epoch))

    def _step(self, batches: Any, epoch: int) -> bool:
        """One step and what follows from it; False when the run is to stop."""
        run, step = self.run, self.progress.step
        waited = self.epoch_clock.waited
        lr = run.optimizer.param_groups[-1]['lr']
        outcome = train_step(run, batches, step, self.epoch_clock, self._wishes)
        self.interval_clock.waited += self.epoch_clock.waited - waited
        self.progress.step += 1
        if outcome.reason is None:
            self.meter.add(outcome.loss)
        self._note(outcome)
        self.report.step_done()
        if self.progress.step % run.config.log_interval == 0:
            self._log_interval(epoch, lr)
        stop, due = outcome.wishes
        if (stop or due) and not run.data.is_stream:
            self.save()
        return not stop

    def _wishes(self, done: int) -> tuple[bool, bool]:
        stop = self.should_stop is not None and self.should_stop(done)
        return stop, self.saver.due(done)

    def _note(self, outcome: Outcome) -> None:
        for text in self.faults.note(outcome):
            self.report.say(text)
        if outcome.reason is not None or outcome.bad_images:
            self.report.attempt(self.faults.write)
        try:
            self.faults.check()
        except RunError as error:
            if self.saver.last_step is None and not self.run.data.is_stream:
                self.save()  # skipped steps have left the weights as good as they were
            raise RunError(f'{error}; {self.saver.left()}') from None

    def _log_interval(self, epoch: int, lr: float) -> None:
        config, clock = self.run.config, self.interval_clock
        row = {
            'step': self.progress.step,
            'epoch': epoch + 1,
            'loss': self.meter.take('interval'),
            'lr': lr,
            'images_per_s': round(config.log_interval * config.global_batch / clock.elapsed, 1),
            'data_wait': round(clock.wait_share, 4),
        }
        clock.reset()
        if self.log is not None:
            self.log.add(row)
            self.report.attempt(self.log.flush)
        self.report.interval(row)

    def _finish_epoch(self) -> bool:
        """Evaluate where due, note the epoch, write checkpoints; False when asked to stop during the evaluation."""
        run, epoch = self.run, len(self.progress.history) + 1
        clock = self.epoch_clock
        speed = self.timed_steps * run.config.global_batch / clock.elapsed
        metrics: dict[str, float] | None = {}
        if epoch % run.config.val_interval == 0 or epoch == run.config.epochs:
            metrics = self.evaluate()
        if metrics is None:
            if not run.data.is_stream:
                self.save()
            return False
        row: dict[str, Any] = {'epoch': epoch, 'step': self.progress.step}
        row['lr'] = run.optimizer.param_groups[-1]['lr']
        row['train_loss'] = self.meter.take('epoch')
        row['skipped'], self.progress.skipped['epoch'] = self.progress.skipped['epoch'], 0
        # timing columns come last, and are the only ones that a continuation does not repeat
        row |= metrics | {'images_per_s': round(speed, 1), 'data_wait': round(clock.wait_share, 4)}
        row['seconds'] = round(time.perf_counter() - clock.started, 2)
        self.progress.history.append(row)
        if metrics and self._is_best(row) and self.saver.write_best(weights_state(run, row)):
            self.progress.best = row
        self.save()
        self.report.end_epoch(self.progress.history)
        return True

    def evaluate(self) -> dict[str, float] | None:
        run, evaluation = self.run, self.run.evaluation
        try:
            return evaluate(
                run.evaluated_models(),
                evaluation.batches,
                evaluation.task,
                run.place,
                evaluation.num_images,
                evaluation.autocast,
                self._interrupted,
            )
        except BadImage:
            if not run.data.is_stream:
                self.save()  # with the image repaired, the continuation begins with this evaluation
            raise

    def _interrupted(self) -> bool:
        """Whether this rank or another is asked to stop: ranks have different numbers of batches to agree after."""
        if self.should_stop is not None and self.should_stop(self.progress.step):
            self.run.place.tell('stop')
            return True
        return self.run.place.told('stop')

    def _is_best(self, row: dict[str, Any]) -> bool:
        name, best = self.run.config.eval_metric, self.progress.best
        return best is None or self.run.task.is_better(row[name], best[name])

    def save(self) -> None:
        self.saver.write(run_state(self.run, self.progress, self.meter))
