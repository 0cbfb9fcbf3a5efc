"""Signals that ask a run to leave: SIGTERM and SIGINT, and SIGUSR1, which SLURM sends ahead of the end of a job."""

import signal
from types import FrameType
from typing import Any

from ..errors import Exit

EXIT_CODE = Exit.PREEMPTED
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Preemption:
    """While entered, signals are recorded instead of ending the process; the loop asks after every step.

    Before the loop has asked for the first time there is nothing to save, and the process leaves at once. A second
    SIGINT is a person who does not want to wait, and interrupts.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> 'Preemption':
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)  # first: where Python ignores exceptions, the next one is lost
        if not self.asked:
            raise SystemExit(EXIT_CODE)

    def __call__(self, step: int) -> bool:
        self.asked = True
        return self.received is not None
