"""A disk without room at the end of a run or after a signal: waited for, or told by an exit code of its own."""

import os
import resource
import signal

import pytest

import train as command
from nprf_vit.engine.checkpoint import saver
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.checkpoint.saver import Saver
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.engine.preemption import Preemption
from nprf_vit.errors import Exit
from tests.engine.running import assert_same_end, config_file, in_child, run_here

from .disks import fill, free, small_disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / 'disk') as folder:
        yield folder


def run_command(tmp_path, output, keys, at_step=None, at_pause=None, patience=2):
    """train.py in a process of its own, with something happening after each step and in each pause."""
    file = config_file(tmp_path, **keys, checkpoint_patience=patience)
    args = ['--config', str(file), '--output', str(output), '--resume', 'auto']
    asked, pause = Preemption.__call__, Saver._pause

    def ask(self, step):
        at_step(step)
        return asked(self, step)

    def wait(self):
        if at_pause:
            at_pause()
        pause(self)

    def work():
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(saver, 'PAUSE', 0.2)
            monkeypatch.setattr(Saver, '_pause', wait)
            if at_step:
                monkeypatch.setattr(Preemption, '__call__', ask)
            return command.main(args)

    return in_child(work)


def full_from(disk, first):
    return lambda step: fill(disk) if step >= first else None


def test_a_disk_that_fills_in_the_last_epoch_is_no_success(scans, disk, tmp_path, capfd):
    assert run_command(tmp_path, disk / 'out', scans, full_from(disk, 7)) == Exit.NOT_SAVED == 74
    said = capfd.readouterr()
    lines = said.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: last.pt, summary.csv of step 10 could not')
    assert lines[0].endswith('the last checkpoint is that of step 5; make room and continue with --resume auto')
    assert 'No space left on device' in said.out and '2 more attempts' in said.out
    assert 'epoch   2/2' in said.out and 'top-1   top-5' not in said.out
    assert read_checkpoint(disk / 'out' / 'last.pt')['step'] == 5
    free(disk)
    assert run_command(tmp_path, disk / 'out', scans) == Exit.DONE
    run_here(tmp_path / 'whole', **scans)
    assert_same_end(tmp_path / 'whole', disk / 'out')


def test_a_disk_that_is_freed_while_the_end_waits(scans, disk, tmp_path, capfd):
    assert run_command(tmp_path, disk / 'out', scans, full_from(disk, 7), lambda: free(disk)) == Exit.DONE
    assert 'top-1   top-5' in capfd.readouterr().out
    run_here(tmp_path / 'whole', **scans)
    assert_same_end(tmp_path / 'whole', disk / 'out')


def test_best_weights_that_fit_late_are_known_to_the_checkpoint(scans, tmp_path):
    """last.pt is written, best.pt is not: once it is, last.pt must say so."""
    keys = {**scans, 'epochs': 1, 'warmup_epochs': 0}
    output = tmp_path / 'out'

    def obstacle(step):
        (output / 'best.pt').mkdir(exist_ok=True)  # a folder of that name refuses the renaming

    assert run_command(tmp_path, output, keys, obstacle, lambda: (output / 'best.pt').rmdir()) == Exit.DONE
    assert read_checkpoint(output / 'last.pt')['best']['epoch'] == 1
    assert read_checkpoint(output / 'best.pt')['step'] == 5


def test_a_file_size_limit_leaves_no_checkpoint_and_no_success(scans, tmp_path, capfd):
    keys = {**scans, 'epochs': 1, 'warmup_epochs': 0}

    def limit(step):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    assert run_command(tmp_path, tmp_path / 'out', keys, limit) == Exit.NOT_SAVED
    assert 'error: best.pt, last.pt of step 5 could not be written' in capfd.readouterr().err
    assert not list((tmp_path / 'out').glob('*.pt'))
    assert read_rows(tmp_path / 'out' / 'summary.csv')[0]['step'] == '5'


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_on_a_full_disk_does_not_pretend(scans, disk, tmp_path, capfd, number):
    def full_and_asked(step):
        if step == 7:
            fill(disk)
            os.kill(os.getpid(), number)

    assert run_command(tmp_path, disk / 'out', scans, full_and_asked) == Exit.NOT_SAVED
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and 'last.pt of step 7 could not be written' in lines[0]
    assert 'in 3 attempts; the last checkpoint is that of step 5' in lines[0]


def test_a_signal_on_a_disk_that_is_freed_is_a_preemption(scans, disk, tmp_path):
    def full_and_asked(step):
        if step == 7:
            fill(disk)
            os.kill(os.getpid(), signal.SIGTERM)

    code = run_command(tmp_path, disk / 'out', scans, full_and_asked, lambda: free(disk))
    assert code == Exit.PREEMPTED and read_checkpoint(disk / 'out' / 'last.pt')['step'] == 7
