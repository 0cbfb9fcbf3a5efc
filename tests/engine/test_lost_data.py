"""Data folders that may not be read."""

import os

import pytest

import train as command
from nprf_vit.errors import Exit

from ..data.folders import digit_folder
from .running import config_file, in_child


@pytest.fixture
def data(scans, tmp_path):
    root = digit_folder(tmp_path / 'data', train=40, val=10)
    return root, {**scans, 'data_dir': str(root), 'aug_repeats': 1}


# a folder that may be entered and not listed serves, if the folders in it may be listed
@pytest.mark.parametrize(
    ('forbidden', 'mode'), [('', 0o000), ('', 0o444), ('train', 0o000), ('val', 0o111), ('train/digit2', 0o000)]
)
def test_a_folder_without_permission_is_told_in_one_line(data, tmp_path, capfd, forbidden, mode):
    root, keys = data
    file = config_file(tmp_path, **keys)
    tmp_path.chmod(0o777)
    for path in (*tmp_path.parents[:2], *root.rglob('*'), root):
        path.chmod(path.stat().st_mode | 0o055)
    (root / forbidden).chmod(mode)

    def work():
        if os.geteuid() == 0:  # who may read anything
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return command.main(['--config', str(file), '--output', str(tmp_path / 'out')])

    code = in_child(work)
    (root / forbidden).chmod(0o755)
    lines = capfd.readouterr().err.strip().splitlines()
    assert code == Exit.INPUT, lines[-6:]
    assert len(lines) == 1 and lines[0].startswith('error: ') and 'Permission denied' in lines[0]
