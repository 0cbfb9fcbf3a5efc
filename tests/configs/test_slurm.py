"""The submission scripts, run for real with stand-ins for the two SLURM commands they call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..data.folders import CLASSES, digit_folder
from ..engine.running import config_file

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = {
    'srun': '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    'scontrol': '#!/bin/sh\necho localhost\n',
}


@pytest.mark.slow
@pytest.mark.parametrize('script', ['train_1node', 'train_4nodes'])
def test_script_trains_and_continues(tmp_path, script):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text, encoding='utf-8')
        (tmp_path / name).chmod(0o755)
    root = digit_folder(tmp_path / 'data')
    keys = {'dataset': '', 'num_classes': CLASSES, 'global_batch': 32, 'batch_size': 16, 'epochs': 1}
    file = config_file(tmp_path, **keys, warmup_epochs=0)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ['PATH']])
    env = {**os.environ, 'PATH': path, 'GPUS_PER_NODE': '2', 'SLURM_JOB_ID': str(os.getpid())}
    env |= {'SLURM_NNODES': '1', 'SLURM_JOB_NODELIST': 'localhost'}
    command = ['bash', f'slurm/{script}.sbatch', str(file), str(root), '--output', str(tmp_path / 'out')]
    for expected in ('epoch   1/1', 'is finished'):
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr


def test_scripts_explain_their_arguments():
    for script in sorted((ROOT / 'slurm').glob('*.sbatch')):
        done = subprocess.run(['bash', str(script)], capture_output=True, text=True, timeout=20)
        assert done.returncode != 0 and 'usage: sbatch' in done.stderr
