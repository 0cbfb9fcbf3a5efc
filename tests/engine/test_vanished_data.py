"""Data that cannot be reached: gone under way, or under names of any bytes."""

import os
import shutil
import subprocess
import sys

import pytest

from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.errors import Exit

from ..data.folders import digit_folder
from .running import ROOT, config_file, launch, wait_for

NAMELESS = b'\xff\xfe.png'


@pytest.fixture
def data(scans, tmp_path):
    root = digit_folder(tmp_path / 'data', train=40, val=10)
    return root, {**scans, 'data_dir': str(root), 'aug_repeats': 1}


def test_a_training_folder_that_vanishes_ends_the_run(data, tmp_path):
    root, keys = data
    file = config_file(tmp_path, **{**keys, 'workers': 2, 'epochs': 10_000, 'max_bad_images': 10**6})
    arguments = ['--config', file, '--output', tmp_path / 'out']
    with open(tmp_path / 'log', 'w', encoding='utf-8') as log:
        run = subprocess.Popen([sys.executable, ROOT / 'train.py', *arguments], stdout=log, stderr=subprocess.PIPE)
        try:
            wait_for(lambda: (tmp_path / 'out' / 'last.pt').exists(), 'a checkpoint')
            shutil.rmtree(root / 'train')
            said = run.communicate(timeout=120)[1].decode().strip().splitlines()
        finally:
            run.kill()
    assert run.returncode == Exit.FAILED
    assert len(said) == 1 and said[0].startswith('error: ') and ' cannot be read, the last: ' in said[0], said


@pytest.mark.parametrize('locale', ['C', 'POSIX', 'C.UTF-8'])
def test_a_bad_image_whose_name_is_not_utf8(data, tmp_path, monkeypatch, locale):
    root, keys = data
    (root / 'train' / 'digit1' / os.fsdecode(NAMELESS)).touch()
    file = config_file(tmp_path, **{**keys, 'workers': 1, 'epochs': 2})
    for name in ('LANG', 'LC_CTYPE', 'PYTHONUTF8', 'PYTHONIOENCODING', 'PYTHONCOERCECLOCALE'):
        monkeypatch.delenv(name, raising=False)
    done = launch('train.py', '--config', file, '--output', tmp_path / 'out', LC_ALL=locale)
    assert 'Error' not in done.stderr and r'digit1/\udcff\udcfe.png' in done.stdout
    (row,) = read_rows(tmp_path / 'out' / 'bad_images.csv')
    assert r'digit1/\udcff\udcfe.png' in row['problem']
