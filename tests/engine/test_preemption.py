"""Signals: a checkpoint at the next step, exit code 75, and a continuation that ends as if nothing had been."""

import os
import signal

import pytest

import train as command
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.line_log import LineLog
from nprf_vit.engine.preemption import EXIT_CODE, SIGNALS, Preemption
from nprf_vit.engine.tasks.classification import Classification
from nprf_vit.engine.train import train

from .running import ONE, assert_same_end, config_file, in_child, run_here, small_config


@pytest.fixture(scope='module')
def whole(tmp_path_factory, scans):
    folder = tmp_path_factory.mktemp('whole')
    run_here(folder, **scans)
    return folder


def signalled(number, owner, name, count):
    """A patch: at call `count` of owner.name the process gets a signal."""

    def patch(monkeypatch):
        real, left = getattr(owner, name), [count]

        def call(*args, **kwargs):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), number)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    return patch


def run_command(tmp_path, scans, patch=None):
    args = ['--config', str(config_file(tmp_path, **scans)), '--output', str(tmp_path / 'out'), '--resume', 'auto']

    def work():
        with pytest.MonkeyPatch.context() as monkeypatch:
            if patch:
                patch(monkeypatch)
            return command.main(args)

    return in_child(work)


@pytest.mark.parametrize('number', SIGNALS)
def test_signal_in_a_step(whole, scans, tmp_path, number):
    # the loss of the first micro-batch of step 3: the step is finished, and the checkpoint is of it
    assert run_command(tmp_path, scans, signalled(number, Classification, 'loss', 5)) == EXIT_CODE == 75
    assert read_checkpoint(tmp_path / 'out' / 'last.pt')['step'] == 3
    assert run_command(tmp_path, scans) == 0
    assert_same_end(whole, tmp_path / 'out')


def test_signal_in_an_evaluation(whole, scans, tmp_path):
    keys = {**scans, 'validation_batch_size': 8}
    assert run_command(tmp_path, keys, signalled(signal.SIGTERM, Classification, 'measure', 3)) == EXIT_CODE
    content = read_checkpoint(tmp_path / 'out' / 'last.pt')
    assert content['step'] == 5 and content['history'] == []
    assert run_command(tmp_path, keys) == 0
    run_here(tmp_path / 'whole', **keys)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


def test_signal_in_a_checkpoint(whole, scans, tmp_path):
    """The file is finished; the next step is the last."""
    patch = signalled(signal.SIGTERM, LineLog, 'flush', 4)  # the start, step 2, step 4, then the first checkpoint
    assert run_command(tmp_path, scans, patch) == EXIT_CODE
    assert read_checkpoint(tmp_path / 'out' / 'last.pt')['step'] == 6
    assert run_command(tmp_path, scans) == 0
    assert_same_end(whole, tmp_path / 'out')


def test_before_the_first_step_there_is_nothing_to_wait_for():
    with Preemption() as asked:
        with pytest.raises(SystemExit) as left:
            signal.raise_signal(signal.SIGUSR1)
        assert left.value.code == EXIT_CODE
        assert asked(1)  # the exception may have come up where Python ignores it, as in a hook of fork


def test_a_second_interrupt_does_not_wait():
    before = signal.getsignal(signal.SIGINT)  # a job in the background of a shell is started with it ignored
    with Preemption() as asked:
        assert not asked(1)
        signal.raise_signal(signal.SIGINT)
        assert asked(1) and asked.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_checkpoint_every_few_minutes(scans, tmp_path, monkeypatch):
    saved, clock = [], [0.0]
    monkeypatch.setattr('nprf_vit.engine.checkpoint.saver.time.monotonic', lambda: clock[0])
    monkeypatch.setattr(
        'nprf_vit.engine.checkpoint.saver.save_checkpoint',
        lambda state, path, *keep: saved.append((path.name, state['step'])),
    )

    def a_minute_passes(step):
        clock[0] += 60
        return False

    config = small_config(**{**scans, 'epochs': 1, 'warmup_epochs': 0, 'checkpoint_minutes': 2.0})
    train(config, ONE, tmp_path, None, a_minute_passes)
    assert [step for name, step in saved if name == 'last.pt'] == [2, 4, 5]
