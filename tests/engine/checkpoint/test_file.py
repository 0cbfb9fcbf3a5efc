"""Checkpoint files: what is in them, how many are kept, and what happens to those that are not what they seem."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import train as command
from nprf_vit.engine.checkpoint.file import InaccessibleCheckpoint, checkpoints, read_checkpoint, save_checkpoint
from nprf_vit.engine.model import build_model
from nprf_vit.engine.validate import validate
from nprf_vit.errors import Exit, InputError
from tests.data.folders import digit_folder
from tests.engine.running import (
    ONE,
    as_nobody,
    assert_same_end,
    config_file,
    in_child,
    open_to_all,
    run_here,
    same,
    small_config,
    state,
)


@pytest.fixture(scope='module')
def whole(tmp_path_factory, scans):
    folder = tmp_path_factory.mktemp('whole')
    run_here(folder, recovery_interval=1, **scans)
    return folder


def test_the_last_few_are_kept(whole):
    assert [path.name for path in checkpoints(whole)] == ['last.pt', 'last-1.pt', 'last-2.pt']
    # the last step is written after the step and again after its evaluation
    assert [read_checkpoint(path)['step'] for path in checkpoints(whole)] == [10, 10, 9]


def test_fewer_are_kept_when_asked(tmp_path):
    for step, keep in enumerate((4, 4, 4, 4, 4, 2, 1)):
        save_checkpoint({'format': 2, 'step': step}, tmp_path / 'last.pt', keep)
        steps = [read_checkpoint(path)['step'] for path in checkpoints(tmp_path)]
        assert steps == [s for s in range(step, step - keep, -1) if s >= 0]


def test_everything_is_in_it(whole):
    content = read_checkpoint(whole / 'last.pt')
    for name in ('state_dict', 'state_dict_ema', 'optimizer', 'scaler', 'meter', 'best', 'history'):
        assert content[name] is not None
    assert content['position'] == {'epoch': 2, 'step': 0, 'images': 160, 'next': content['position']['next']}
    assert len(content['position']['next']) == 8 and len(content['generators']) == 1


def test_the_schedule_has_no_state_in_it_but_older_files_do(whole, scans, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    content = read_checkpoint(whole / 'last-2.pt')
    assert 'scheduler' not in content
    for path in checkpoints(tmp_path):
        path.unlink()
    save_checkpoint({**content, 'scheduler': {'step': content['step']}}, tmp_path / 'last.pt')
    run_here(tmp_path, resume='auto', **scans)
    assert_same_end(whole, tmp_path)


def test_the_first_format_is_refused_with_a_way_out(whole, scans, tmp_path):
    content = {**read_checkpoint(whole / 'last.pt'), 'format': 1}
    torch.save(content, tmp_path / 'last.pt')
    with pytest.raises(InputError, match=r'is a checkpoint of format 1: .* commit 637e454, which writes format 2'):
        run_here(tmp_path, resume=str(tmp_path / 'last.pt'), **scans)
    keys = {**scans, 'initial_checkpoint': str(tmp_path / 'last.pt')}
    assert same(dict(build_model(small_config(**keys)).state_dict()), dict(content['state_dict'])) == []


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b'')


def foreign(path):
    torch.save({'weights': torch.zeros(3)}, path)


def of_another_run(path):
    content = read_checkpoint(path)
    content['config']['lr'] = 1.0
    save_checkpoint(content, path)  # without generations: the other files stay


def of_other_values(path):
    """A valid file whose checksum belongs to other weights."""
    content = torch.load(path, weights_only=True)
    content['state_dict']['head.bias'][0] += 1e-6
    torch.save(content, path)


DAMAGE = (cut, flip, empty, foreign, of_another_run, of_other_values)


@pytest.mark.parametrize('damage', DAMAGE)
def test_the_newest_good_one_is_taken(whole, scans, tmp_path, capsys, damage):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / 'last.pt')
    damage(tmp_path / 'last-1.pt')
    run_here(tmp_path, resume='auto', **scans)
    said = capsys.readouterr().out
    for name in ('last.pt', 'last-1.pt'):
        assert str(tmp_path / name) in said and f'set aside as {name}.damaged' in said
    assert 'continuing after step 9' in said
    assert_same_end(whole, tmp_path)


def test_without_a_good_one_the_user_decides(whole, scans, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for path in checkpoints(tmp_path):
        cut(path)
    with pytest.raises(InputError, match=r'last.pt: .*last-2.pt: .* holds no other checkpoint: remove it to begin'):
        run_here(tmp_path, resume='auto', **scans)
    assert len(checkpoints(tmp_path)) == 3


def forbid(path):
    path.chmod(0o000)


def fail_to_read(path):
    """Linux: a regular file whose first byte gives EIO."""
    path.unlink()
    path.symlink_to('/proc/self/mem')


@pytest.mark.parametrize(
    ('hide', 'user', 'reason'),
    [(forbid, as_nobody, 'Permission denied'), (fail_to_read, lambda work: work, 'Input/output error')],
)
@pytest.mark.parametrize('resume', ['auto', 'last.pt'])
def test_one_that_cannot_be_read_stays_where_it_is(whole, scans, tmp_path, capfd, hide, user, reason, resume):
    run = tmp_path / 'run'
    shutil.copytree(whole, run)
    file = config_file(tmp_path, recovery_interval=1, **scans)
    open_to_all(tmp_path)
    open_to_all(Path(scans['data_dir']), above=1)
    for path in (run, *run.iterdir()):
        path.chmod(0o777)
    hide(run / 'last.pt')
    arguments = ['--config', str(file), '--output', str(run)]
    arguments += ['--resume', resume if resume == 'auto' else str(run / resume)]
    names = sorted(path.name for path in run.iterdir())
    code = in_child(user(lambda: command.main(arguments)))
    lines = capfd.readouterr().err.strip().splitlines()
    assert code == Exit.INPUT, lines[-6:]
    (line,) = lines
    assert line.startswith(f'error: cannot read checkpoint {run}/last.pt: {reason}; it stays where it is')
    assert sorted(path.name for path in run.iterdir()) == names


def test_a_read_that_fails_once_is_no_damage(whole, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(torch, 'load', fail)
    with pytest.raises(InaccessibleCheckpoint, match='Input/output error'):
        read_checkpoint(whole / 'last.pt')


def test_any_changed_byte_is_noticed_or_harmless(whole, tmp_path):
    good, expected = (whole / 'last.pt').read_bytes(), read_checkpoint(whole / 'last.pt')
    rng, refused, path = random.Random(0), 0, tmp_path / 'last.pt'
    for _ in range(100):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            assert same(read_checkpoint(path), expected) == []  # padding, a date, a name that nobody reads
        except InputError:
            refused += 1
    assert refused > 50


class Trap:
    def __reduce__(self):
        return open, ('executed', 'w')


def test_no_entrance_executes_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'format': 2, 'model': Trap(), 'state_dict': Trap()}, 'trap.pt')
    for enter in (
        lambda: read_checkpoint('trap.pt'),
        lambda: read_checkpoint('trap.pt', any_format=True),
        lambda: build_model(small_config(initial_checkpoint='trap.pt')),
        lambda: validate(small_config(), ONE, 'trap.pt'),
        lambda: run_here(tmp_path / 'out', resume='trap.pt'),
    ):
        with pytest.raises(InputError, match='cannot read checkpoint'):
            enter()
    assert not (tmp_path / 'executed').exists()


def test_weights_from_safetensors(whole, tmp_path, scans):
    weights = state(whole)['state_dict']
    safetensors.torch.save_file(weights, tmp_path / 'weights.safetensors')
    keys = {**scans, 'initial_checkpoint': str(tmp_path / 'weights.safetensors')}
    assert same(dict(build_model(small_config(**keys)).state_dict()), dict(weights)) == []


def test_a_training_set_that_changed(tmp_path, scans):
    root = digit_folder(tmp_path / 'data', train=40, val=10)
    keys = {**scans, 'data_dir': str(root)}
    run_here(tmp_path / 'out', stop_at=3, **keys)
    shutil.copy(root / 'train' / 'digit1' / '000.png', root / 'train' / 'digit1' / 'new.png')
    with pytest.raises(InputError, match='written with 160 training images, and there are 161 now'):
        run_here(tmp_path / 'out', resume='auto', **keys)
