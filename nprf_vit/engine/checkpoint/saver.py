"""When checkpoints are written, and what happens when the disk does not take them."""

import time
from collections.abc import Callable
from typing import Any

from nprf_vit.config.schema import Config
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.distributed.watchdog import Phase
from nprf_vit.engine.output.folder import Output
from nprf_vit.errors import NotSaved, RunError

from .file import LAST, save_checkpoint

BEST = 'best.pt'
PAUSE = 60.0  # seconds between attempts to write what a run must not end without


class Saver:
    """Writes on the main rank; all ranks learn how it went and give up together.

    Args:
        output: Its logs are written before each checkpoint, so that a continuation finds every line up to its step.
        say: Where to tell of failures.
    """

    def __init__(self, config: Config, place: Place, output: Output, say: Callable[[str], None]) -> None:
        self.config, self.place, self.output, self.say = config, place, output, say
        self.folder = output.folder
        self.written_at, self.failures = time.monotonic(), 0
        self.last_step: int | None = None  # of the newest checkpoint on the disk, where known

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due by the main rank's clock. Also if the folder is lost: the attempt reports it."""
        if self.config.recovery_interval and step % self.config.recovery_interval == 0:
            return True
        minutes = (time.monotonic() - self.written_at) / 60
        return self.output.lock.lost or (self.place.is_main and 0 < self.config.checkpoint_minutes <= minutes)

    def write(self, state: dict[str, Any]) -> bool:
        """The next last.pt. False if it could not be written, and the run may go on."""
        if self.write_last(state):
            return True
        self.failures += 1
        patience = self.config.checkpoint_patience
        if self.failures > patience:
            raise RunError(
                f'{self.failures} checkpoints in a row could not be written to {self.folder}; {self.newest()}'
            )
        self.say(f'failure {self.failures} in a row (checkpoint_patience {patience}); {self.newest()}')
        return False

    def write_last(self, state: dict[str, Any]) -> bool:
        def work() -> None:
            for log in (self.output.steps, self.output.skips, self.output.biases):
                if log is not None:
                    log.flush(sync=True)
            save_checkpoint(state, self.folder / LAST, self.config.checkpoint_hist)

        written = self.attempt(LAST, work)
        self.written_at = time.monotonic()  # or a full disk would be tried after every step
        if written:
            self.last_step, self.failures = state['step'], 0
        return written

    def write_best(self, state: dict[str, Any]) -> bool:
        return self.attempt(BEST, lambda: save_checkpoint(state, self.folder / BEST))

    def write_all(self, works: dict[str, Callable[[], bool]], step: int) -> None:
        """What the run must not end without, by name and in order, each a call that tells whether it is written.

        What fails is tried again after a pause, `checkpoint_patience` times. A late success brings those after it
        once more: last.pt says which epoch's weights are in best.pt.
        """
        missing, patience = set(works), self.config.checkpoint_patience
        for left in range(patience, -1, -1):
            again = False
            for name, work in works.items():
                if name in missing or again:
                    again = work()
                    (missing.discard if again else missing.add)(name)
            if not missing:
                return
            names = ', '.join(name for name in works if name in missing)
            if left:
                self.say(f'step {step} cannot end without {names}: {left} more attempts, the next in {PAUSE:g} s')
                self._pause()
        raise NotSaved(
            f'{names} of step {step} could not be written to {self.folder} in {patience + 1} attempts; '
            f'{self.newest()}; make room and continue with --resume auto'
        )

    def _pause(self) -> None:
        """Wait on every rank, with heartbeats."""
        end = time.monotonic() + PAUSE
        while (left := end - time.monotonic()) > 0:
            self.place.heartbeat.enter(Phase.SAVING)
            time.sleep(min(left, 0.5))

    def newest(self) -> str:
        """What there is to continue from."""
        none = 'there is no checkpoint yet'
        return none if self.last_step is None else f'the last checkpoint is that of step {self.last_step}'

    def attempt(self, name: str, work: Callable[[], None]) -> bool:
        """Write a file on the main rank; whether that worked, on all ranks."""
        self.place.heartbeat.enter(Phase.SAVING)
        failed = False
        if self.place.is_main:
            try:
                self.output.lock.check()
                work()
            except OSError as error:
                failed = True
                self.say(f'cannot write {self.folder / name}: {error}')
        failed = self.place.any(failed)  # also the point up to which all ranks wait
        if failed and self.place.any(self.output.lock.lost):
            raise NotSaved(
                f'the output folder {self.folder} was removed, moved or replaced while this run was writing to it: '
                f'it ends without {name}, and writes nothing into another folder'
            )
        return not failed
