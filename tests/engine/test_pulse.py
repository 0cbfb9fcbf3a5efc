"""A rank that stalls is named, with its phase, and the group does not wait for ever."""

import signal

import pytest

from nprf_vit.engine.pulse import PHASES, STALLED, Pulse, Watchdog

from .running import config_file, in_child, launch


def watchdog(states, timeout=10.0):
    """As rank 0 sees it: by rank (step, phase, seconds since the last sign of life, micro-batch), at time 100."""
    dog = Watchdog(Pulse(), 0, len(states), None, timeout)
    for rank, (step, phase, ago, *micro_step) in enumerate(states):
        dog.seen[rank] = ([step, *(micro_step or [0]), PHASES.index(phase), 1], 100 - ago)
    return dog.stalled(100.0)


def test_the_rank_behind_is_blamed():
    found = watchdog([(8, 'backward', 30), (8, 'waiting for data', 31), (8, 'backward', 29)])
    assert found == {1: 'waiting for data, step 8, for 31 s'}
    assert list(watchdog([(9, 'waiting for data', 30), (8, 'writing a checkpoint', 31)])) == [1]
    assert list(watchdog([(8, 'backward', 30, 0), (8, 'forward', 31, 1)])) == [0]


def test_waiting_for_a_slow_rank_is_no_stall():
    assert watchdog([(5, 'summing up the evaluation', 500), (5, 'evaluation', 3)]) == {}
    assert watchdog([(5, 'forward', 9), (5, 'forward', 10)]) == {}


def test_every_entrance_is_a_sign_of_life():
    pulse = Pulse()
    pulse.enter('evaluation', 7)
    first = pulse.state
    pulse.enter('evaluation')
    assert pulse.state != first and pulse.state[:3] == first[:3]


def test_a_single_process_that_stalls_ends():
    def work():
        with Watchdog(Pulse(), 0, 1, None, 0.5):
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
