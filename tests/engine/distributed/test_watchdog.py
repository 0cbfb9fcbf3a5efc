"""A rank that stalls is named, with its phase, and the group does not wait for ever."""

import contextlib
import os
import signal
import subprocess
import time

import pytest
import torch.distributed as dist

from nprf_vit.engine.distributed.watchdog import STALLED, Heartbeat, Phase, Seen, State, Watchdog
from tests.engine.running import config_file, in_child, launch


def watchdog(states, silent=None, answered=None, timeout=10.0):
    """As rank 0 sees it: by rank (step, phase, seconds since the last sign of life, micro-batch), at time 100."""
    dog = Watchdog(Heartbeat(), 0, len(states), timeout)
    dog.clock, dog.answered = 100.0, answered
    for rank, (step, phase, ago, *micro_step) in enumerate(states):
        state = State(step, *(micro_step or [0]), list(Phase).index(Phase(phase)), 1)
        dog.seen[rank] = Seen(state, 100 - ago, 7, 100 - (silent or {}).get(rank, 0))
    return dog.stalled()


def test_the_rank_behind_is_blamed():
    found = watchdog([(8, 'backward', 30), (8, 'waiting for data', 31), (8, 'backward', 29)])
    assert found == {1: 'waiting for data, step 8, for 31 s'}
    assert list(watchdog([(9, 'waiting for data', 30), (8, 'writing a checkpoint', 31)])) == [1]
    assert list(watchdog([(8, 'backward', 30, 0), (8, 'forward', 31, 1)])) == [0]


def test_waiting_for_a_slow_rank_is_no_stall():
    assert watchdog([(5, 'summing up the evaluation', 500), (5, 'evaluation', 3)]) == {}
    assert watchdog([(5, 'forward', 9), (5, 'forward', 10)]) == {}


def test_a_rank_without_a_heartbeat_is_blamed_wherever_it_was():
    """What it last told may be ahead of those that wait for it."""
    states = [(3, 'forward', 11), (3, 'backward', 11), (3, 'forward', 11)]
    assert watchdog(states, silent={1: 11}) == {1: 'silent for 11 s, last in backward, step 3'}
    assert watchdog(states, silent={1: 9}) == {}  # it is not certain yet, and nobody else is to blame meanwhile
    assert list(watchdog(states)) == [0, 2]


def test_without_the_store_no_rank_is_judged():
    states = [(3, 'forward', 5), (3, 'forward', 50)]
    assert watchdog(states, silent={1: 50}, answered=95.0) == {}
    assert watchdog(states, silent={1: 50}, answered=89.0) == {None: 'no answer for 11 s'}


def test_a_process_that_was_frozen_itself_blames_nobody():
    """Its clock stands still while it is, so that what the others did meanwhile is not counted as silence."""

    def work():
        heartbeat = Heartbeat()
        with Watchdog(heartbeat, 0, 2, 1.0) as dog:
            dog.follow(dist.HashStore(), 'here')
            dog.seen[1] = Seen([9, 0, 0, 0], dog.clock, 0, dog.clock)
            thaw = subprocess.Popen(['sh', '-c', f'sleep 3; kill -CONT {os.getpid()}'])
            os.kill(os.getpid(), signal.SIGSTOP)
            heartbeat.enter(Phase.STARTING)
            time.sleep(0.3)
            thaw.wait()

    assert in_child(work) == 0


class Unreachable(dist.Store):
    """Answers as a server behind a link that is down: not at all."""

    def set(self, key, value):
        time.sleep(3600)


def test_a_store_that_does_not_answer_ends_the_process(capfd):
    def work():
        with Watchdog(Heartbeat(), 1, 2, 1.0) as dog:
            dog.follow(Unreachable(), '10.0.0.1:29500')
            signal.pause()

    assert in_child(work) == STALLED
    assert 'error (rank 1): the store at 10.0.0.1:29500: no answer for 1 s; this node or' in capfd.readouterr().err


def test_leaving_does_not_wait_for_the_store():
    def work():
        with Watchdog(Heartbeat(), 1, 2, 600.0) as dog:
            dog.interval = 0.01
            dog.follow(Unreachable(), '10.0.0.1:29500')
            time.sleep(0.3)

    begin = time.monotonic()
    assert in_child(work) == 0
    assert time.monotonic() - begin < 30


def test_last_words_that_nobody_takes_do_not_keep_the_process():
    """Standard error is a pipe that is full."""

    def work():
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b'x' * 4096)
        os.set_blocking(writer, True)
        os.dup2(writer, 2)
        with Watchdog(Heartbeat(), 0, 1, 0.5):
            signal.pause()

    assert in_child(work) == STALLED


def test_every_entrance_is_a_sign_of_life():
    heartbeat = Heartbeat()
    heartbeat.enter(Phase.EVALUATION, 7)
    first = heartbeat.state
    heartbeat.enter(Phase.EVALUATION)
    assert heartbeat.state != first and heartbeat.state.position == first.position


def test_a_single_process_that_stalls_ends():
    def work():
        with Watchdog(Heartbeat(), 0, 1, 0.5):
            signal.pause()

    assert in_child(work) == STALLED


def test_a_rank_that_hangs_is_named(scans, tmp_path):
    file = config_file(tmp_path, **{**scans, 'stall_timeout': 6.0, 'batch_size': 16})
    done = launch('tests/engine/faulty.py', file, tmp_path / 'out', 'hang', 1, 3, processes=2, expect=1)
    assert 'stalled: rank 1 (waiting for data, step 3, for ' in done.stderr
    assert 'exitcode  : 70' in done.stderr
    assert 'in faulty' in done.stderr  # the stack of the stalled rank


@pytest.mark.slow
def test_a_rank_that_is_frozen_is_named_by_the_others(scans, tmp_path):
    file = config_file(tmp_path, **{**scans, 'stall_timeout': 6.0, 'batch_size': 16})
    env = {'TORCH_ELASTIC_SHUTDOWN_TIMEOUT': '3'}
    done = launch('tests/engine/faulty.py', file, tmp_path / 'out', 'stop', 1, 3, processes=2, expect=1, **env)
    # its phase is the last that it published, a moment before
    assert 'error (rank 0): stalled: rank 1 (' in done.stderr and 'stall_timeout is 6 s' in done.stderr
