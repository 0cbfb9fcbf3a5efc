"""When checkpoints are written, and what happens when the disk does not take them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import RunError
from .checkpoint import LAST, save_checkpoint
from .config import Config
from .distributed import Place
from .line_log import LineLog


class Saver:
    """Writes on the main rank; all ranks learn how it went and give up together.

    Args:
        logs: Written before each checkpoint, so that a continuation finds every line up to its step.
        say: Where to tell of failures.
    """

    def __init__(self, config: Config, place: Place, folder: Path, logs: list[LineLog], say: Callable[[str], None]):
        self.config, self.place, self.folder, self.logs, self.say = config, place, folder, logs, say
        self.written_at, self.failures = time.monotonic(), 0
        self.last_step: int | None = None  # of the newest checkpoint on the disk, where known

    def due(self, step: int) -> bool:
        """Whether it is time for one; the main rank's clock counts."""
        if self.config.recovery_interval and step % self.config.recovery_interval == 0:
            return True
        minutes = (time.monotonic() - self.written_at) / 60
        return self.place.is_main and 0 < self.config.checkpoint_minutes <= minutes

    def write(self, state: dict[str, Any]) -> bool:
        """The next last.pt. False if it could not be written, and the run may go on."""

        def work():
            for log in self.logs:
                log.flush(sync=True)
            save_checkpoint(state, self.folder / LAST, self.config.checkpoint_hist)

        written = self._attempt(LAST, work)
        self.written_at = time.monotonic()  # or a full disk would be tried after every step
        if written:
            self.last_step, self.failures = state['step'], 0
            return True
        self.failures += 1
        patience = self.config.checkpoint_patience
        if self.failures > patience:
            raise RunError(f'{self.failures} checkpoints in a row could not be written to {self.folder}; {self.left()}')
        self.say(f'failure {self.failures} in a row (checkpoint_patience {patience}); {self.left()}')
        return False

    def left(self) -> str:
        """What there is to continue from."""
        none = 'there is no checkpoint yet'
        return none if self.last_step is None else f'the last checkpoint is that of step {self.last_step}'

    def write_best(self, state: dict[str, Any]) -> bool:
        return self._attempt('best.pt', lambda: save_checkpoint(state, self.folder / 'best.pt'))

    def _attempt(self, name: str, work: Callable[[], None]) -> bool:
        self.place.pulse.enter('writing a checkpoint')
        failed = False
        if self.place.is_main:
            try:
                work()
            except OSError as error:
                failed = True
                self.say(f'cannot write {self.folder / name}: {error}')
        return not self.place.any(failed)  # also the point up to which all ranks wait
