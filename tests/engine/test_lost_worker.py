"""Loader workers that are killed, as by the kernel when memory is short."""

import multiprocessing
import os
import signal

import pytest
import torch

from nprf_vit.data.workers import SafeLoader, WorkerLost, batches_of_workers, setup_worker
from nprf_vit.errors import Exit

from .running import assert_same_end, config_file, launch, run_here, small_config


class Numbers(torch.utils.data.Dataset):
    """Item i is i; the process that reads item `trap` kills itself, unless it is the parent."""

    def __init__(self, trap, number=signal.SIGKILL):
        self.trap, self.number, self.parent = trap, number, os.getpid()

    def __getitem__(self, index):
        if index == self.trap and os.getpid() != self.parent:
            os.kill(os.getpid(), self.number)
        return index


def loader(trap, number=signal.SIGKILL, workers=2):
    batches = [[i, i + 1] for i in range(0, 20, 2)]
    return SafeLoader(Numbers(trap, number), batch_sampler=batches, num_workers=workers, worker_init_fn=setup_worker)


@pytest.mark.parametrize('trap', [0, 9, 19])
def test_every_batch_comes_once_and_in_order(trap, capfd):
    safe = loader(trap)
    before = signal.getsignal(signal.SIGCHLD)
    assert [batch.tolist() for batch in safe] == [[i, i + 1] for i in range(0, 20, 2)]
    said = capfd.readouterr().err.strip().splitlines()
    assert safe.lost and len(said) == 1
    assert 'was killed by SIGKILL, most likely by the kernel for lack of memory: fewer workers' in said[0]
    assert signal.getsignal(signal.SIGCHLD) == before  # an error in the middle of an update would leave half of it
    assert len(list(safe)) == 10  # and again, without workers


def test_one_that_dies_between_two_passes(capfd):
    batches = [[i] for i in range(4)]
    options = {'num_workers': 1, 'worker_init_fn': setup_worker, 'persistent_workers': True}
    safe = SafeLoader(Numbers(None), batch_sampler=batches, **options)
    assert len(list(safe)) == 4
    os.kill(safe.workers[0].pid, signal.SIGKILL)
    assert [batch.item() for batch in safe] == [0, 1, 2, 3]
    assert 'was killed by SIGKILL' in capfd.readouterr().err


def test_the_reason_follows_from_the_signal(capfd):
    assert len(list(loader(3, signal.SIGUSR2))) == 10
    assert 'was killed by SIGUSR2, by another process' in capfd.readouterr().err
    assert not loader(None).lost


def test_an_error_in_a_worker_stays_what_it_is():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise RuntimeError('DataLoader worker (pid 1) is a strange text')

    loader = SafeLoader(Broken(0), batch_sampler=[[0]], num_workers=1, worker_init_fn=setup_worker)
    with pytest.raises(RuntimeError, match='Caught RuntimeError in DataLoader worker'):
        list(loader)


def test_a_stream_cannot_go_on_but_a_new_start_can():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield 0
            os.kill(os.getpid(), signal.SIGKILL)

    stream = torch.utils.data.DataLoader(Stream(), num_workers=1, worker_init_fn=setup_worker)
    with pytest.raises(WorkerLost, match='killed by SIGKILL') as caught:
        list(batches_of_workers(stream.__iter__))
    assert caught.value.exit_code == Exit.PREEMPTED


@pytest.mark.parametrize('processes', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_leaves_with_a_checkpoint_and_continues(scans, tmp_path, processes):
    """One worker of one rank is killed in its first epoch; the group stops at the same step."""
    file = config_file(tmp_path, **{**scans, 'workers': 2, 'batch_size': 16, 'recovery_interval': 0})
    args = file, tmp_path / 'out', 'worker', processes - 1, 3
    done = launch('tests/engine/faulty.py', *args, processes=processes, expect=1 if processes > 1 else Exit.PREEMPTED)
    said = [line for line in done.stderr.splitlines() if 'was killed by SIGKILL' in line]
    assert len(said) == 1 and said[0].startswith('error (rank 1): loader worker' if processes > 1 else 'error: loader')
    assert 'stopped at step' in done.stdout
    assert 'exitcode  : 75' in done.stderr if processes > 1 else 'Traceback' not in done.stderr
    launch('tests/engine/faulty.py', *args, processes=processes)
    launch('train.py', '--config', file, '--output', tmp_path / 'whole', processes=processes)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


def test_a_worker_lost_in_an_evaluation(scans, tmp_path, monkeypatch, capfd):
    """The evaluation is broken off, and is the first thing that the continuation does."""
    from nprf_vit.data.samples import EvalSamples

    plain, parent, mark = EvalSamples.__getitem__, os.getpid(), tmp_path / 'mark'

    def trapped(self, index):
        if os.getpid() != parent and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, index)

    monkeypatch.setattr(EvalSamples, '__getitem__', trapped)
    keys = {**scans, 'workers': 1}
    assert run_here(tmp_path / 'out', **keys) is None
    assert 'was killed by SIGKILL' in capfd.readouterr().err
    assert run_here(tmp_path / 'out', resume='auto', **keys)['epoch'] == small_config().epochs
    run_here(tmp_path / 'whole', **keys)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')
    assert not [child for child in multiprocessing.active_children() if child.exitcode]
