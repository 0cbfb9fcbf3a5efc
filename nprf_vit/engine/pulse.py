"""Signs of life: what each rank is doing, and an end to waiting for one that does nothing any more."""

import faulthandler
import json
import os
import sys
import threading
import time

import torch.distributed as dist

from ..errors import Exit

STALLED = Exit.STALLED

# in the order in which a micro-batch, and then the step, passes through them; who is behind is who the others wait for
PHASES = ('starting', 'waiting for data', 'forward', 'backward', 'agreeing', 'update', 'evaluation')
PHASES += ('summing up the evaluation', 'writing a checkpoint', 'ending')


class Pulse:
    """The phase this process is in. Entering one, even the same again, is a sign of life."""

    def __init__(self) -> None:
        self.state = [0, 0, 0, 0]  # step, micro-batch, phase, signs of life

    def enter(self, phase: str, step: int | None = None, micro_step: int | None = None) -> None:
        """Without a step or micro-batch: still in the one before."""
        last_step, last_micro_step, _, signs = self.state
        step, micro_step = step or last_step, last_micro_step if micro_step is None else micro_step
        self.state = [step, micro_step, PHASES.index(phase), signs + 1]


class Watchdog:
    """A thread that publishes this rank's pulse in the store, follows the others', and ends the process at a stall.

    A rank counts as stalled when no other is behind it and it has shown no sign of life for `timeout` seconds. Ranks
    that wait for it have gone further and are not blamed. All ranks come to the same result, each on its own.
    """

    def __init__(self, pulse: Pulse, rank: int, world: int, store: dist.Store | None, timeout: float):
        self.pulse, self.rank, self.world, self.store, self.timeout = pulse, rank, world, store, timeout
        self.interval = min(timeout / 20, 10.0)
        self.seen: dict[int, tuple[list[int], float]] = {}  # by rank: its last state and when it came
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)

    def __enter__(self) -> 'Watchdog':
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(self.interval):
            try:
                self._exchange()
            except (RuntimeError, OSError):  # the store is gone, and with it the group: its collectives will say so
                return
            found = self.stalled(time.monotonic())
            if found:
                self._give_up(found)

    def _exchange(self) -> None:
        states = {self.rank: self.pulse.state}
        if self.store is not None:
            self.store.set(str(self.rank), json.dumps(self.pulse.state))
            others = [rank for rank in range(self.world) if rank != self.rank and self.store.check([str(rank)])]
            texts = self.store.multi_get([str(rank) for rank in others]) if others else []
            states |= {rank: json.loads(text) for rank, text in zip(others, texts)}
        now = time.monotonic()
        for rank, state in states.items():
            if rank not in self.seen or self.seen[rank][0] != state:
                self.seen[rank] = (state, now)

    def stalled(self, now: float) -> dict[int, str]:
        """The ranks that hold up the group, with what they are doing."""
        behind = min(state[:3] for state, _ in self.seen.values())
        return {
            rank: f'{PHASES[state[2]]}, step {state[0]}, for {now - since:.0f} s'
            for rank, (state, since) in sorted(self.seen.items())
            if state[:3] == behind and now - since > self.timeout
        }

    def _give_up(self, found: dict[int, str]) -> None:
        names = '; '.join(f'rank {rank} ({text})' for rank, text in found.items())
        print(f'error (rank {self.rank}): stalled: {names}; stall_timeout is {self.timeout:g} s', file=sys.stderr)
        if self.rank in found:
            faulthandler.dump_traceback(all_threads=True)
        else:
            time.sleep(2 * self.interval)  # let the stalled rank, if it can, say where it is
        sys.stderr.flush()
        os._exit(STALLED)  # the main thread may never come back to be asked
