"""Two runs and one name for their folder: at no time do two of them write into it, and none misses what was written."""

import contextlib
import hashlib
import os
import resource
import shutil
import time

import pytest

import train as command
from nprf_vit.engine.output.folder import Output
from nprf_vit.engine.output.lock import FolderLost, SoleWriter
from nprf_vit.engine.preemption import Preemption
from nprf_vit.errors import Exit, InputError
from tests.engine.running import assert_same_end, config_file, in_child, launch, run_here, small_config

TAKEN = 'another process is writing to the output folder'


def content(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize('what', ['removed', 'moved', 'replaced'])
def test_a_run_whose_folder_is_gone_writes_nothing_more(scans, tmp_path, capfd, what):
    """Replaced: another run has come and gone there, with another configuration."""
    output, seen = tmp_path / 'out', tmp_path / 'seen'
    file = config_file(tmp_path, **scans, recovery_interval=1)
    asked = Preemption.__call__

    def ask(self, step):
        if step == 3:
            os.rename(output, tmp_path / 'away')
            if what == 'removed':
                shutil.rmtree(tmp_path / 'away')
            if what == 'replaced':
                assert in_child(lambda: run_here(output, **{**scans, 'seed': 5}) and None) == 0
                seen.write_text(str(content(output)), encoding='utf-8')
        return asked(self, step)

    def work():
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(Preemption, '__call__', ask)
            return command.main(['--config', str(file), '--output', str(output)])

    assert in_child(work) == Exit.NOT_SAVED
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and 'was removed, moved or replaced while this run was writing to it' in lines[0]
    if what == 'replaced':
        assert str(content(output)) == seen.read_text(encoding='utf-8')
    else:
        assert not output.exists()


def test_a_lost_folder_ends_the_run_before_the_next_checkpoint_is_due(scans, tmp_path):
    """A line of the log notices it, and the step after that is the last."""
    steps, output = [], tmp_path / 'out'

    def lose(step):
        steps.append(step)
        if step == 1:
            shutil.rmtree(output)
        return False

    def work():
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(Preemption, '__call__', lambda self, step: lose(step))
            return command.main(['--config', str(config_file(tmp_path, **scans)), '--output', str(output)])

    assert in_child(lambda: (work() != Exit.NOT_SAVED) or steps[-1] != 3) == 0  # log_interval is 2


def test_a_start_that_waited_continues_from_what_was_written_meanwhile(scans, tmp_path, monkeypatch, capsys):
    run_here(tmp_path / 'out', stop_at=3, **scans)
    shutil.copytree(tmp_path / 'out', tmp_path / 'longer')
    run_here(tmp_path / 'longer', stop_at=7, resume='auto', **scans)
    other, sleep = SoleWriter(tmp_path / 'out').__enter__(), time.sleep

    def write_and_leave(seconds):
        monkeypatch.setattr(time, 'sleep', sleep)
        for name in ('last.pt', 'last-1.pt', 'best.pt', 'steps.csv', 'summary.csv'):
            shutil.copy(tmp_path / 'longer' / name, tmp_path / 'out' / name)
        other.__exit__()

    monkeypatch.setattr(time, 'sleep', write_and_leave)
    run_here(tmp_path / 'out', resume='auto', **scans)
    assert 'continuing after step 7' in capsys.readouterr().out
    run_here(tmp_path / 'whole', **scans)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


def test_a_folder_that_appears_during_the_start(scans, tmp_path):
    output = Output(tmp_path / 'out')
    with contextlib.ExitStack() as stack:
        output.hold(stack)
        assert not output.lock.held
        run_here(tmp_path / 'out', stop_at=1, **scans)
        with pytest.raises(InputError, match='holds a run already'):
            output.open(small_config(**scans), 1, stack)


def test_the_lock_is_that_of_the_folder_which_has_the_name(tmp_path, monkeypatch):
    folder = tmp_path / 'out'
    folder.mkdir()
    other, sleep = SoleWriter(folder).__enter__(), time.sleep

    def replace(seconds):
        monkeypatch.setattr(time, 'sleep', sleep)
        folder.rmdir()
        folder.mkdir()

    monkeypatch.setattr(time, 'sleep', replace)
    with SoleWriter(folder) as own:
        own.check()
        with pytest.raises(InputError, match=TAKEN), SoleWriter(folder, patience=0):
            pass
    with pytest.raises(FolderLost, match='removed, moved or replaced'):
        other.check()
    other.__exit__()


def test_the_lock_ends_with_an_error_too(tmp_path):
    """Loader workers are forked: a copy of the descriptor lives on in them."""
    copies = []
    with pytest.raises(RuntimeError, match='told'), SoleWriter(tmp_path) as lock:
        copies.append(os.dup(lock._descriptor))
        raise RuntimeError('told')
    with SoleWriter(tmp_path, patience=0):
        pass
    os.close(copies[0])


@pytest.mark.slow
def test_two_processes_give_up_together(scans, tmp_path):
    keys = {**scans, 'epochs': 1, 'warmup_epochs': 0, 'checkpoint_patience': 0}
    file = config_file(tmp_path, **keys)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        done = launch('train.py', '--config', file, '--output', tmp_path / 'out', processes=2, expect=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 'error: best.pt, last.pt of step 5 could not be written' in done.stderr
    assert 'exitcode  : 74' in done.stderr
