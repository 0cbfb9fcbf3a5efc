"""The watchdog: each rank publishes what it is doing, and a rank that makes no progress ends the group."""

import enum
import faulthandler
import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from nprf_vit.errors import Exit

STALLED = Exit.STALLED


class Phase(enum.Enum):
    """What a rank is doing, in the order in which a micro-batch, and then the step, passes through it.

    Who is behind is who the others wait for.
    """

    JOINING = 'joining the group'
    STARTING = 'starting'
    LOADING = 'waiting for data'
    FORWARD = 'forward'
    BACKWARD = 'backward'
    AGREEING = 'agreeing'
    UPDATE = 'update'
    EVALUATION = 'evaluation'
    SUMMING = 'summing up the evaluation'
    SAVING = 'writing a checkpoint'
    ENDING = 'ending'


_PHASES = list(Phase)
_MISSED = 5  # heartbeats in a row, from which on a rank is not counted as alive
_REPORTING = 5.0  # seconds for the last message


class State(NamedTuple):
    """Where a rank is; of two positions, the greater has gone further."""

    step: int = 0
    micro_step: int = 0
    phase: int = 0  # by its order
    signs: int = 0  # of life so far

    @property
    def position(self) -> tuple[int, int, int]:
        return self.step, self.micro_step, self.phase

    def __str__(self) -> str:
        return f'{_PHASES[self.phase].value}, step {self.step}'


class Heartbeat:
    """The phase this process is in. Entering one, even the same again, is a sign of life."""

    def __init__(self) -> None:
        self.state = State()

    def enter(self, phase: Phase, step: int | None = None, micro_step: int | None = None) -> None:
        """Enter a phase; step and micro-batch stay as they were unless given."""
        last = self.state
        micro_step = last.micro_step if micro_step is None else micro_step
        self.state = State(step or last.step, micro_step, _PHASES.index(phase), last.signs + 1)


@dataclass
class Seen:
    """What this rank knows of one rank, itself included."""

    state: State
    changed: float  # when its state was last another one
    beat: int  # of its watchdog, which beats while its main thread waits, and stops with the process or its network
    heard: float  # when the beat was last another one


class Watchdog:
    """Threads that publish this rank's heartbeat in the store, follow the others', and end the process at a stall.

    A rank whose heartbeat has stopped for `timeout` seconds is to blame: it is frozen, gone or cut off, and its last
    state is older than that. With all hearts beating it is a rank behind which there is no other and which has shown
    no sign of life for `timeout` seconds; ranks that wait for it have gone further. A store that does not answer for
    so long ends the process too.

    Calls of the store may block for as long as the kernel keeps a dead connection, a quarter of an hour. They have a
    thread of their own, for which nobody waits.
    """

    def __init__(self, heartbeat: Heartbeat, rank: int, world: int, timeout: float) -> None:
        self.heartbeat, self.rank, self.world, self.timeout = heartbeat, rank, world, timeout
        self.interval = min(timeout / 20, 10.0)
        self.clock = 0.0  # seconds that this process has been running: while it is frozen, no other can be late
        self.seen: dict[int, Seen] = {}
        self.answered: float | None = None  # when the store last did; None while there is no store
        self.address = ''
        self.ended = threading.Event()

    def __enter__(self) -> 'Watchdog':
        threading.Thread(target=self._watch, name='watchdog', daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()

    def follow(self, store: dist.Store, address: str) -> None:
        """From now on compare with the other ranks; the connection must be used by nobody else."""
        self.answered, self.address = self.clock, address
        self.seen = {rank: Seen(State(), self.clock, 0, self.clock) for rank in range(self.world)}
        threading.Thread(target=self._exchange_all, args=(store,), name='heartbeat', daemon=True).start()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self.ended.wait(self.interval):
            now = time.monotonic()
            self.clock += min(now - before, 2 * self.interval)
            before = now
            self._note(self.rank, self.heartbeat.state, int(self.clock / self.interval))
            found = self.stalled()
            if found and not self.ended.is_set():
                self._give_up(found)

    def _exchange_all(self, store: dist.Store) -> None:
        beat = 0
        while not self.ended.wait(self.interval):
            beat += 1
            try:
                self._exchange(store, beat)
            except (RuntimeError, OSError):  # the store is gone: unless the run ends now, it counts as not answering
                return

    def _exchange(self, store: dist.Store, beat: int) -> None:
        store.set(str(self.rank), json.dumps([beat, *self.heartbeat.state]))
        others = [rank for rank in range(self.world) if rank != self.rank and store.check([str(rank)])]
        for rank, text in zip(others, store.multi_get([str(rank) for rank in others]) if others else []):
            their_beat, *numbers = json.loads(text)
            self._note(rank, State(*numbers), their_beat)
        self.answered = self.clock

    def _note(self, rank: int, state: State, beat: int) -> None:
        old = self.seen.get(rank)
        changed = old.changed if old and old.state == state else self.clock
        heard = old.heard if old and old.beat == beat else self.clock
        self.seen[rank] = Seen(state, changed, beat, heard)

    def stalled(self) -> dict[int | None, str]:
        """The ranks that hold up the group, with what they are doing; None stands for the store."""
        now, seen = self.clock, dict(self.seen)
        if self.answered is not None and now - self.answered > _MISSED * self.interval:  # others cannot be judged
            late = now - self.answered
            return {None: f'no answer for {late:.0f} s'} if late > self.timeout else {}
        silent = {rank: it for rank, it in seen.items() if now - it.heard > _MISSED * self.interval}
        if silent:  # others may seem to be behind them, in what they last told; wait until it is certain
            lost = {rank: it for rank, it in silent.items() if now - it.heard > self.timeout}
            return {rank: f'silent for {now - it.heard:.0f} s, last in {it.state}' for rank, it in sorted(lost.items())}
        behind = min((it.state.position for it in seen.values()), default=None)
        return {
            rank: f'{it.state}, for {now - it.changed:.0f} s'
            for rank, it in sorted(seen.items())
            if it.state.position == behind and now - it.changed > self.timeout
        }

    def _give_up(self, found: dict[int | None, str]) -> None:
        reporting = threading.Thread(target=self._report, args=(found,), daemon=True)
        reporting.start()
        reporting.join(
            _REPORTING + 2 * self.interval
        )  # a pipe that nobody reads, a log on a lost file server: then unsaid
        os._exit(STALLED)  # the main thread may never come back to be asked

    def _report(self, found: dict[int | None, str]) -> None:
        limit = f'stall_timeout is {self.timeout:g} s'
        if None in found:
            message = f'the store at {self.address}: {found[None]}; this node or that of the store is cut off; {limit}'
        else:
            message = 'stalled: ' + '; '.join(f'rank {rank} ({text})' for rank, text in found.items()) + f'; {limit}'
        print(f'error (rank {self.rank}): {message}', file=sys.stderr, flush=True)
        if self.rank in found:
            faulthandler.dump_traceback(all_threads=True)
        elif None not in found:
            time.sleep(2 * self.interval)  # let the stalled rank, if it can, say where it is
        sys.stdout.flush()
