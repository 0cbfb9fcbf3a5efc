"""SIGKILL at every kind of moment: the continuation ends with bitwise the state and the tables of a quiet run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nprf_vit.engine.output import line_log
from nprf_vit.engine.tasks.classification import Classification
from tests.engine.running import ROOT, assert_same_end, config_file, in_child, launch, run_here, wait_for


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope='module')
def whole(tmp_path_factory, scans):
    folder = tmp_path_factory.mktemp('whole')
    run_here(folder, **scans)
    return folder


def killed_at(folder, scans, patch):
    """A run of its own process that dies where `patch` says; checkpoints every second step."""

    def work():
        with pytest.MonkeyPatch.context() as monkeypatch:
            patch(monkeypatch)
            run_here(folder, resume='auto', recovery_interval=2, **scans)

    return in_child(work) == -signal.SIGKILL


def renaming(old, new, count=1, after=False):
    """Dies at the given renaming; names that begin with a dot are files being written."""

    def patch(monkeypatch):
        real, left = os.replace, [count]

        def replace(a, b):
            a, b = Path(a), Path(b)
            hit = b.name == new and (a.name.startswith('.') if old == '.' else a.name == old)
            left[0] -= hit
            if hit and not left[0] and not after:
                die()
            real(a, b)
            if hit and not left[0]:
                die()

        monkeypatch.setattr(os, 'replace', replace)

    return patch


def in_writing(count):
    """Dies with half of a checkpoint in its temporary file."""

    def patch(monkeypatch):
        real, left = torch.save, [count]

        def save(content, stream):
            left[0] -= 1
            if not left[0]:
                stream.write(b'PK' * 5000)
                stream.flush()
                die()
            real(content, stream)

        monkeypatch.setattr(torch, 'save', save)

    return patch


def in_evaluation(monkeypatch):
    monkeypatch.setattr(Classification, 'measure', lambda *args: die())


def in_epoch(count):
    def patch(monkeypatch):
        real, left = Classification.loss, [count]

        def loss(*args):
            left[0] -= 1
            if not left[0]:
                die()
            return real(*args)

        monkeypatch.setattr(Classification, 'loss', loss)

    return patch


def in_a_line(monkeypatch):
    """Dies with half a line of steps.csv written."""
    real, left = os.pwrite, [2]

    def pwrite(descriptor, data, offset):
        left[0] -= 1
        if not left[0]:
            real(descriptor, data[: len(data) // 2], offset)
            die()
        return real(descriptor, data, offset)

    monkeypatch.setattr(line_log.os, 'pwrite', pwrite)


MOMENTS = {
    'before the first checkpoint': in_epoch(1),
    'in an epoch': in_epoch(14),  # two micro-batches a step
    'in an evaluation': in_evaluation,
    'writing the first checkpoint': in_writing(1),
    'writing a later one': in_writing(6),
    'between generations': renaming('last.pt', 'last-1.pt', 3, after=True),
    'before the new one is in place': renaming('.', 'last.pt', 4),
    'after it': renaming('.', 'last.pt', 4, after=True),
    'between best and last': renaming('.', 'best.pt', after=True),
    'before the summary': renaming('.', 'summary.csv'),
    'in a line of the log': in_a_line,
}


@pytest.mark.parametrize('moment', MOMENTS)
def test_killed_run_ends_the_same(whole, scans, tmp_path, moment):
    assert killed_at(tmp_path, scans, MOMENTS[moment])
    run_here(tmp_path, resume='auto', **scans)
    assert_same_end(whole, tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith('.')]


def children(pid):
    found = []
    for task in Path(f'/proc/{pid}/task').iterdir():
        found += [int(child) for child in (task / 'children').read_text().split()]
    return found


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='looks into /proc')
def test_killed_command_leaves_no_worker_and_continues(scans, tmp_path):
    keys = {**scans, 'epochs': 4}
    run_here(tmp_path / 'whole', **keys)
    args = '--config', config_file(tmp_path, **keys), '--output', tmp_path / 'out', '--resume', 'auto'
    args = [*map(str, args), '--set', 'recovery_interval=1', 'workers=2']
    with subprocess.Popen([sys.executable, 'train.py', *args], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        wait_for((tmp_path / 'out' / 'last.pt').is_file, 'a checkpoint')
        workers = children(process.pid)
        process.kill()
    assert process.returncode == -signal.SIGKILL and len(workers) >= 2
    wait_for(lambda: not any(Path(f'/proc/{pid}').exists() for pid in workers), 'the workers to die', seconds=10)
    launch('train.py', *args)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')
