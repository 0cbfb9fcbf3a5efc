"""An output folder in a bad state: told in one line before the work, or repaired where no result depends on it."""

import json
import os
from pathlib import Path

import pytest

import train as command
from nprf_vit.errors import Exit
from tests.engine.running import config_file, in_child, run_here


@pytest.fixture
def stopped(scans, tmp_path):
    run_here(tmp_path / 'out', stop_at=3, **scans)
    return tmp_path / 'out'


def run_as(user, scans, output):
    """train.py --resume auto in a process that may be another user's: root may read and write anything."""
    file = config_file(output.parent, **scans)
    for path in (output.parent, *output.parents[1:3], Path(scans['data_dir'])):
        path.chmod(path.stat().st_mode | 0o055)

    def work():
        if user and os.geteuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        return command.main(['--config', str(file), '--output', str(output), '--resume', 'auto'])

    return in_child(work)


@pytest.mark.parametrize(
    'text', ['', '[', '{}', 'null', '[' * 100_000, b'\xff\xfe', ' ' * (2**24 + 1)], ids=lambda text: repr(text[:3])
)
def test_a_damaged_record_of_launches_does_not_block(stopped, scans, capfd, text):
    (stopped / 'launches.json').write_bytes(text if isinstance(text, bytes) else text.encode())
    run_here(stopped, resume='auto', stop_at=4, **scans)
    assert 'launches.json cannot be read' in capfd.readouterr().out
    assert len(json.loads((stopped / 'launches.json').read_text(encoding='utf-8'))) == 1
    assert (stopped / 'launches.json.damaged').is_file()


def forbid_folder(output):
    output.chmod(0o000)


def forbid_writing(output):
    output.chmod(0o555)


def forbid_steps(output):
    output.chmod(0o777)
    (output / 'steps.csv').chmod(0o000)


def forbid_config(output):
    output.chmod(0o777)
    (output / 'config.yaml').chmod(0o000)


@pytest.mark.parametrize('forbid', [forbid_folder, forbid_writing, forbid_steps, forbid_config])
def test_what_may_not_be_touched_is_told_in_one_line(stopped, scans, capfd, forbid):
    forbid(stopped)
    assert run_as(65534, scans, stopped) == Exit.INPUT
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: ') and 'Permission denied' in lines[0]
    stopped.chmod(0o755)


@pytest.mark.parametrize('name', ['steps.csv', 'summary.csv', 'skipped_steps.jsonl', 'launches.json', 'config.yaml'])
def test_a_folder_in_the_place_of_a_file(stopped, scans, capfd, name):
    (stopped / name).unlink(missing_ok=True)
    (stopped / name).mkdir()
    assert run_as(0, scans, stopped) == Exit.INPUT
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: cannot write to the output folder')
