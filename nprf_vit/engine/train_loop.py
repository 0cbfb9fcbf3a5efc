"""The training loop: epochs of steps, evaluation after each, checkpoints, and exact resume."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from nprf_vit.data.batch import Batch
from nprf_vit.engine.checkpoint.file import LAST
from nprf_vit.engine.checkpoint.saver import BEST, Saver
from nprf_vit.engine.checkpoint.state import Progress, run_state, weights_state
from nprf_vit.engine.distributed.watchdog import Phase
from nprf_vit.engine.output.csv_file import write_rows
from nprf_vit.engine.output.folder import Output
from nprf_vit.engine.output.report import Reporter
from nprf_vit.errors import BadImage, RunError

from .build import Training
from .eval_loop import evaluate
from .faults import Faults
from .hard_images import HardImages
from .loss_meter import LossMeter, Span
from .train_step import Clock, Outcome, PendingStep, Requests, compute_gradients, finish_step, start_update


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
        output: Output,
        should_stop: Callable[[int], bool] | None = None,
    ) -> None:
        self.run, self.progress, self.meter, self.should_stop = run, progress, meter, should_stop
        place, steps = run.place, run.data.steps_per_epoch
        self.report = Reporter(
            run.config, output.folder, run.total_steps, steps, progress.step, place.is_main, run.task, output.loggers
        )
        self.report.check = output.lock.check
        self.output, self.log = output, output.steps
        self.faults = Faults(run, progress, output.folder, output.skips)
        self.saver = Saver(run.config, place, output, self.report.say)
        self.epoch_clock, self.interval_clock = Clock(), Clock()
        self.report.epochs_done = len(progress.history)
        self.hard: HardImages | None = None  # of the last evaluation

    def go(self) -> bool:
        """Train to the end; False if asked to stop on the way."""
        self.report.attempt(self.faults.write)  # as of the checkpoint
        try:
            while len(self.progress.history) < self.run.config.epochs:
                if not self._train_epoch() or not self._finish_epoch():
                    return False
            return True
        finally:
            self.run.place.heartbeat.enter(Phase.ENDING)
            self.report.close()

    def _train_epoch(self) -> bool:
        run, epoch = self.run, len(self.progress.history)
        first = self.progress.step - epoch * run.data.steps_per_epoch
        run.wrapped.train()
        self.report.start_epoch(epoch, first)
        self.epoch_clock, self.interval_clock, self.timed_steps = Clock(), Clock(), run.data.steps_per_epoch - first
        if not self.timed_steps:
            return True  # stopped between the epoch's last step and its evaluation
        return self._train_steps(
            run.data.epoch(epoch, first), range(self.progress.step, self.progress.step + self.timed_steps)
        )

    def _train_steps(self, batches: Iterator[Batch], steps: range) -> bool:
        """False when the run is to stop."""
        run, pending = self.run, None
        for step in steps:
            waited = self.epoch_clock.waited
            gradients = compute_gradients(run, batches, step, self.epoch_clock)
            self.interval_clock.waited += self.epoch_clock.waited - waited
            if pending is not None and not self._finish_step(pending):
                return False  # without the update that these gradients are for
            pending = start_update(run, gradients, self._requests(step + 1))
            if not run.gates_on_device:  # the host knows already
                if not self._finish_step(pending):
                    return False
                pending = None
        return pending is None or self._finish_step(pending)

    def _finish_step(self, pending: PendingStep) -> bool:
        """What follows from a step; False when the run is to stop."""
        run, outcome = self.run, finish_step(self.run, pending)
        self.progress.step += 1
        if outcome.non_finite is None:
            self.meter.add(outcome.loss)
        self._note(outcome)
        self.report.step_done()
        if self.progress.step % run.config.log_interval == 0:
            self._log_interval(outcome.lr)
        wanted = outcome.requests
        if any(wanted) and not run.data.is_stream:
            self.save(leaving=wanted.stop)
        return not wanted.stop

    def _requests(self, done: int) -> Requests:
        return Requests(stop=self._asked_to_stop(done), save=self.saver.due(done))

    def _asked_to_stop(self, done: int) -> bool:
        """By `should_stop`, or by the loss of a loader worker, which a new start replaces."""
        loaders = self.run.data.loader, self.run.evaluation and self.run.evaluation.batches
        lost = any(getattr(loader, 'lost', False) for loader in loaders)
        return lost or (self.should_stop is not None and self.should_stop(done))

    def _note(self, outcome: Outcome) -> None:
        for text in self.faults.note(outcome):
            self.report.say(text)
        if outcome.non_finite is not None or outcome.bad_images:
            self.report.attempt(self.faults.write)
        try:
            self.faults.check()
        except RunError as error:
            if self.saver.last_step is None and not self.run.data.is_stream:
                self.save()  # skipped steps have left the weights as good as they were
            raise RunError(f'{error}; {self.saver.newest()}') from None

    def _log_interval(self, lr: float) -> None:
        config, clock = self.run.config, self.interval_clock
        row = {
            'step': self.progress.step,
            'epoch': len(self.progress.history) + 1,
            'loss': self.meter.take(Span.INTERVAL),
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
                self.save(leaving=True)
            return False
        row: dict[str, Any] = {'epoch': epoch, 'step': self.progress.step}
        row['lr'] = run.schedule.lr
        row['train_loss'] = self.meter.take(Span.EPOCH)
        row['skipped'], self.progress.skipped.epoch = self.progress.skipped.epoch, 0
        # timing columns come last, and are the only ones that a continuation does not repeat
        row |= metrics | {'images_per_s': round(speed, 1), 'data_wait': round(clock.wait_share, 4)}
        row['seconds'] = round(time.perf_counter() - clock.started, 2)
        self.progress.history.append(row)
        self._note_biases(epoch)
        try:
            self._save_epoch(row, bool(metrics) and self._is_best(row))
        finally:
            self.report.end_epoch(self.progress.history)  # the numbers are known, whatever the disk says
        return True

    def _note_biases(self, epoch: int) -> None:
        log = self.output.biases
        if log is not None and log.due(epoch, self.run.config.epochs):
            log.add(self.run.model, self.progress.step, epoch)
            self.report.attempt(log.flush)

    def _save_epoch(self, row: dict[str, Any], best: bool) -> None:
        """Write the epoch's checkpoints; after the last epoch also the results, with retries."""
        if row['epoch'] < self.run.config.epochs:
            if best:
                self._save_best(row)
            self.save()
            return
        works = {BEST: lambda: self._save_best(row)} if best else {}
        summary = self.output.folder / 'summary.csv'
        works |= {
            LAST: self._save_last,
            summary.name: lambda: self.saver.attempt(summary.name, lambda: write_rows(summary, self.progress.history)),
        }
        if self.progress.bad_images:
            works['bad_images.csv'] = lambda: self.saver.attempt('bad_images.csv', self.faults.write)
        self.saver.write_all(works, self.progress.step)

    def _save_best(self, row: dict[str, Any]) -> bool:
        written = self.saver.write_best(weights_state(self.run, row))
        if written:
            self.progress.best = row
        return written

    def _save_last(self) -> bool:
        return self.saver.write_last(run_state(self.run, self.progress, self.meter))

    def evaluate(self) -> dict[str, float] | None:
        run, evaluation = self.run, self.run.evaluation
        assert evaluation is not None, 'a run on synthetic images is not evaluated'
        if len(self.progress.history) + 1 == run.config.epochs:
            prefix = 'ema_' if run.config.eval_metric.startswith('ema_') else ''
            self.hard = HardImages(evaluation.task, prefix)
        try:
            return evaluate(
                run.evaluated_models(),
                evaluation.batches,
                evaluation.task,
                run.place,
                evaluation.num_images,
                evaluation.autocast,
                self._interrupted,
                None if self.hard is None else self.hard.observe,
            )
        except BadImage:
            if not run.data.is_stream:
                self.save()  # with the image repaired, the continuation begins with this evaluation
            raise

    def _interrupted(self) -> bool:
        """Whether any rank is asked to stop. Ranks may have different numbers of evaluation batches."""
        if self._asked_to_stop(self.progress.step):
            self.run.place.set_flag('stop')
            return True
        return self.run.place.has_flag('stop')

    def _is_best(self, row: dict[str, Any]) -> bool:
        name, best = self.run.config.eval_metric, self.progress.best
        return best is None or self.run.task.is_better(row[name], best[name])

    def save(self, leaving: bool = False) -> None:
        """Write the next last.pt; with retries if the run is about to leave."""
        if leaving:
            self.saver.write_all({LAST: self._save_last}, self.progress.step)
        else:
            self.saver.write(run_state(self.run, self.progress, self.meter))
