"""The submission scripts, run for real with stand-ins for the two SLURM commands they call."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nprf_vit.engine.checkpoint.file import read_checkpoint

from ..data.folders import CLASSES, digit_folder
from ..engine.running import config_file, wait_for

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = {
    'srun': '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    'scontrol': '#!/bin/sh\nif [ "$1" = requeue ]; then echo requeued "$2"; else echo localhost; fi\n',
}


def prepare(tmp_path, script, **keys):
    """The command and environment of a script for a small run."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text, encoding='utf-8')
        (tmp_path / name).chmod(0o755)
    root = digit_folder(tmp_path / 'data')
    keys = {'dataset': '', 'num_classes': CLASSES, 'global_batch': 32, 'batch_size': 16, **keys}
    file = config_file(tmp_path, **keys)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ['PATH']])
    env = {**os.environ, 'PATH': path, 'GPUS_PER_NODE': '2', 'SLURM_JOB_ID': str(os.getpid())}
    env |= {'SLURM_NNODES': '1', 'SLURM_JOB_NODELIST': 'localhost'}
    return ['bash', f'slurm/{script}.sbatch', str(file), str(root), '--output', str(tmp_path / 'out')], env


@pytest.mark.slow
@pytest.mark.parametrize('script', ['train_1node', 'train_4nodes'])
def test_script_trains_and_continues(tmp_path, script):
    command, env = prepare(tmp_path, script, epochs=1, warmup_epochs=0)
    for expected in ('epoch   1/1', 'is finished'):
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('script', ['train_1node', 'train_4nodes'])
def test_script_leaves_ahead_of_its_time_limit_and_is_queued_again(tmp_path, script):
    command, env = prepare(tmp_path, script, epochs=400)
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes) as process:
        wait_for((tmp_path / 'out' / 'last.pt').is_file, 'a checkpoint')
        process.send_signal(signal.SIGUSR1)
        said = process.communicate(timeout=100)[0]
    assert process.returncode != 0 and 'stopped at step' in said and f'requeued {os.getpid()}' in said
    step = read_checkpoint(tmp_path / 'out' / 'last.pt')['step']
    assert f'the last checkpoint is that of step {step}' in said


def test_scripts_explain_their_arguments():
    for script in sorted((ROOT / 'slurm').glob('*.sbatch')):
        done = subprocess.run(['bash', str(script)], capture_output=True, text=True, timeout=20)
        assert done.returncode != 0 and 'usage: sbatch' in done.stderr
