"""The training loop: epochs of steps, evaluation after each, checkpoints, and an exact way back in."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .build import Training
from .checkpoint import Progress, atomic_save, run_state, weights_state
from .evaluate import evaluate
from .meter import LossMeter
from .output import StepLog
from .report import Reporter
from .step import Clock, train_step


class Loop:
    """A run under way.

    Args:
        should_stop: asked after every step, with the number of steps done; when it says yes on one rank, all ranks
            write a checkpoint and leave. Preemption hooks in here.
    """

    def __init__(
        self,
        run: Training,
        progress: Progress,
        meter: LossMeter,
        folder: Path,
        should_stop: Callable[[int], bool] | None = None,
    ):
        self.run, self.progress, self.meter, self.folder, self.should_stop = run, progress, meter, folder, should_stop
        steps = run.data.steps_per_epoch
        self.report = Reporter(run.config, folder, run.total_steps, steps, progress.step, run.place.is_main)
        self.log = StepLog(folder / 'steps.csv', progress.step) if run.place.is_main else None
        self.epoch_clock, self.interval_clock = Clock(), Clock()

    def go(self) -> bool:
        """Train to the end; False if asked to stop on the way."""
        try:
            while len(self.progress.history) < self.run.config.epochs:
                if not self._train_epoch():
                    return False
                self._finish_epoch()
            return True
        finally:
            self.report.close()
            if self.log is not None:
                self.log.close()

    def _train_epoch(self) -> bool:
        run, epoch = self.run, len(self.progress.history)
        first = self.progress.step - epoch * run.data.steps_per_epoch
        run.wrapped.train()
        self.report.start_epoch(epoch, first)
        self.epoch_clock, self.interval_clock, self.timed_steps = Clock(), Clock(), run.data.steps_per_epoch - first
        if not self.timed_steps:
            return True  # stopped between the epoch's last step and its evaluation
        batches = run.data.epoch(epoch, first)
        for _ in range(first, run.data.steps_per_epoch):
            waited = self.epoch_clock.waited
            lr = run.optimizer.param_groups[-1]['lr']
            self.meter.add(train_step(run, batches, self.progress.step, self.epoch_clock))
            self.interval_clock.waited += self.epoch_clock.waited - waited
            self.progress.step += 1
            self.report.step_done()
            if self.progress.step % run.config.log_interval == 0:
                self._log_interval(epoch, lr)
            if not self._after_step():
                return False
        return True

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
            self.log.add(**row)
        self.report.interval(row)

    def _after_step(self) -> bool:
        """Checkpoint where one is due; False when the run is to stop."""
        run, step = self.run, self.progress.step
        stop = self.should_stop is not None and run.place.any(self.should_stop(step))
        due = run.config.recovery_interval and step % run.config.recovery_interval == 0
        if (stop or due) and not run.data.is_stream:
            self.save()
        return not stop

    def _finish_epoch(self) -> None:
        run, epoch = self.run, len(self.progress.history) + 1
        clock = self.epoch_clock
        speed = self.timed_steps * run.config.global_batch / clock.elapsed
        row: dict[str, Any] = {'epoch': epoch, 'step': self.progress.step}
        row['lr'] = run.optimizer.param_groups[-1]['lr']
        row['train_loss'] = self.meter.take('epoch')
        metrics = {}
        if epoch % run.config.val_interval == 0 or epoch == run.config.epochs:
            metrics = self.evaluate()
        # timing columns come last, and are the only ones that a continuation does not repeat
        row |= metrics | {'images_per_s': round(speed, 1), 'data_wait': round(clock.wait_share, 4)}
        row['seconds'] = round(time.perf_counter() - clock.started, 2)
        self.progress.history.append(row)
        if metrics and self._is_best(row):
            self.progress.best = row
            if run.place.is_main:
                atomic_save(weights_state(run, row), self.folder / 'best.pt')
        self.save()
        self.report.end_epoch(self.progress.history)

    def evaluate(self) -> dict[str, float]:
        run, evaluation = self.run, self.run.evaluation
        return evaluate(
            run.evaluated_models(),
            evaluation.batches,
            evaluation.task,
            run.place,
            evaluation.num_images,
            evaluation.autocast,
        )

    def _is_best(self, row: dict[str, Any]) -> bool:
        name, best = self.run.config.eval_metric, self.progress.best
        return best is None or self.run.task.is_better(row[name], best[name])

    def save(self) -> None:
        state = run_state(self.run, self.progress, self.meter)
        if self.run.place.is_main:
            atomic_save(state, self.folder / 'last.pt')
        self.run.place.barrier()
