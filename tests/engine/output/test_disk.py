"""A disk that is full, read-only or forbidden: told at the start, or survived with the last checkpoint intact."""

import contextlib
import os
import resource
import shutil

import pytest

from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.engine.output.folder import Output, check_space
from nprf_vit.engine.output.lock import SoleWriter
from nprf_vit.engine.train import train
from nprf_vit.errors import InputError, RunError
from tests.engine.running import ONE, assert_same_end, in_child, logs, run_here, same, small_config, state

HUGE = resource.RLIM_INFINITY


def limited(size):
    """From now on no file of this process grows beyond `size` bytes: the kernel refuses, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, HUGE))


def full_between(first, last, size):
    """A hook that makes the disk full after step `first` and free again after step `last`."""

    def asked(step):
        limited(size if first <= step < last else HUGE)
        return False

    return asked


def run_with(folder, hook, **keys):
    return train(small_config(**keys), ONE, folder, None, hook)


@pytest.mark.parametrize('size', [0, 20_000])
def test_a_full_disk_that_is_freed_costs_nothing(scans, tmp_path, size):
    """With 0 bytes not even a line of the log fits, with 20000 only checkpoints do not."""
    keys = {**scans, 'epochs': 3, 'recovery_interval': 1, 'log_interval': 1}
    run_here(tmp_path / 'whole', **keys)

    def work():
        run_with(tmp_path / 'out', full_between(2, 7, size), checkpoint_patience=9, **keys)

    assert in_child(work) == 0
    assert logs(tmp_path / 'whole') == logs(tmp_path / 'out')
    assert len(read_rows(tmp_path / 'out' / 'steps.csv')) == 15
    whole, out = state(tmp_path / 'whole'), state(tmp_path / 'out')
    # not the best row: the end of the first epoch fell into the time, and its weights could not be kept
    for name in ('state_dict', 'state_dict_ema', 'optimizer', 'history', 'meter'):
        assert same(whole[name], out[name]) == []


def test_patience_ends_and_the_last_checkpoint_is_intact(scans, tmp_path, capfd):
    keys = {**scans, 'recovery_interval': 1, 'log_interval': 1}
    message = '3 checkpoints in a row could not be written to .*; the last checkpoint is that of step 4'

    def work():
        with pytest.raises(RunError, match=message):
            run_with(tmp_path / 'out', full_between(5, 99, 20_000), checkpoint_patience=2, **keys)

    assert in_child(work) == 0
    said = capfd.readouterr().out
    assert 'cannot write' in said and 'failure 2 in a row (checkpoint_patience 2)' in said
    assert read_checkpoint(tmp_path / 'out' / 'last.pt')['step'] == 4
    run_here(tmp_path / 'whole', **keys)
    run_here(tmp_path / 'out', resume='auto', **keys)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


def test_a_disk_too_small_is_refused_at_the_start(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path, free // 2)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: type('Usage', (), {'free': 50_000})())
    with pytest.raises(InputError, match='has 0 MiB left, and a checkpoint of this run takes'):
        run_here(tmp_path / 'out')


def test_a_folder_that_may_not_be_written_is_refused_at_the_start(tmp_path):
    folder = tmp_path / 'out'
    folder.mkdir()
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(path.stat().st_mode | 0o055)
    folder.chmod(0o555)

    def work():
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write anywhere
        with pytest.raises(InputError, match='cannot write to the output folder .*Permission denied'):
            Output(folder).open(small_config(), 1, contextlib.ExitStack())

    assert in_child(work) == 0


def test_a_folder_has_one_writer(tmp_path):
    taken = pytest.raises(InputError, match='another process is writing to the output folder')
    with SoleWriter(tmp_path), taken, SoleWriter(tmp_path, patience=0):
        pass
    with SoleWriter(tmp_path, patience=0):
        pass
