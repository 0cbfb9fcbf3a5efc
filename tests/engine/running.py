"""Short real runs for tests: scikit-learn's digits, in this process or under torchrun."""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from nprf_vit.config.yaml_file import dump_config, make_config
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.engine.train import train

ROOT = Path(__file__).resolve().parents[2]
ONE = Place(rank=0, world=1, device=torch.device('cpu'))

# two epochs of 11 steps; every source of randomness is on
SMALL = {
    'model': 'nprf_deit_tiny',
    'model_kwargs': {'embed_dim': 32, 'depth': 2, 'num_heads': 2, 'patch_size': 2, 'feature_dim': 8},
    'img_size': 8,
    'in_chans': 1,
    'num_classes': 10,
    'mean': [0.3],
    'std': [0.37],
    'dataset': 'digits',
    'workers': 0,
    'global_batch': 128,
    'batch_size': 64,
    'epochs': 2,
    'lr': 1e-3,
    'warmup_epochs': 1,
    'opt_betas': [0.9, 0.999],
    'weight_decay': 0.05,
    'scale': [0.6, 1.0],
    'color_jitter': 0.3,
    'reprob': 0.25,
    'mixup': 0.8,
    'cutmix': 1.0,
    'mixup_block': 8,
    'aug_repeats': 2,
    'smoothing': 0.1,
    'crop_pct': 1.0,
    'model_ema': True,
    'model_ema_decay': 0.9,
    'log_interval': 4,
    'drop': 0.1,
    'drop_path': 0.1,
}


def small_config(**changes):
    return make_config({**SMALL, **changes})


def run_here(folder: Path, resume=None, stop_at=None, **changes):
    """Train in this process; `stop_at` asks the run to leave after so many steps."""
    stop = None if stop_at is None else (lambda step: step >= stop_at)
    return train(small_config(**changes), ONE, folder, resume, stop)


def launch(
    script: str, *args, processes: int = 1, expect: int = 0, seconds: int = 600, **environment
) -> subprocess.CompletedProcess:
    """Run train.py or validate.py as a user does, alone or under torchrun."""
    command = [sys.executable, str(ROOT / script)]
    if processes > 1:
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(processes)]
        command.append(str(ROOT / script))
    env = {**os.environ, 'PYTHONPATH': str(ROOT), **environment}  # this package, wherever another is installed
    command += [str(arg) for arg in args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds, cwd=ROOT)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def config_file(folder: Path, **changes) -> Path:
    path = folder / 'run.yaml'
    path.write_text(dump_config(small_config(**changes)), encoding='utf-8')
    return path


def same(a, b, path='') -> list[str]:
    """Where two nested states differ in any bit."""
    if isinstance(a, torch.Tensor):
        equal = isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        return [] if equal else [path]
    if isinstance(a, dict):
        if not isinstance(b, dict) or a.keys() != b.keys():
            return [path]
        return [found for key in a for found in same(a[key], b[key], f'{path}/{key}')]
    if isinstance(a, (list, tuple)):
        if not isinstance(b, (list, tuple)) or len(a) != len(b):
            return [path]
        return [found for i, (x, y) in enumerate(zip(a, b)) for found in same(x, y, f'{path}/{i}')]
    return [] if a == b else [path]


TIMING = {'images_per_s', 'data_wait', 'seconds'}


def without_timing(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in TIMING} for row in rows]


def state(folder: Path) -> dict:
    """All of a run's last checkpoint that a continuation must repeat."""
    content = read_checkpoint(folder / 'last.pt')
    content['history'] = without_timing(content['history'])
    content['best'] = without_timing([content['best']])
    return content


def logs(folder: Path) -> list[list[dict]]:
    return [without_timing(read_rows(folder / name)) for name in ('steps.csv', 'summary.csv')]


def assert_same_end(a: Path, b: Path) -> None:
    """Weights, optimizer, moving average, random generators, best weights and both tables agree to the last bit."""
    left, right = state(a), state(b)
    left['config'] = right['config'] = None  # keys on which nothing depends may differ, and only these may
    assert same(left, right) == []
    assert logs(a) == logs(b)
    assert same(*(read_checkpoint(folder / 'best.pt')['state_dict'] for folder in (a, b))) == []


def in_child(work: Callable[[], int | None]) -> int:
    """Run in a forked process, which may die of it; the exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def as_nobody(work: Callable[[], int | None]) -> Callable[[], int | None]:
    """The same work for `in_child`, by a user who may read only what all may: root may read anything."""

    def changed():
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return work()

    return changed


def open_to_all(folder: Path, above: int = 2) -> None:
    """Let every user enter and read a folder with all that is in it, and enter those above it."""
    for path in (*folder.parents[:above], *folder.rglob('*'), folder):
        path.chmod(path.stat().st_mode | 0o055)


def wait_for(condition: Callable[[], bool], what: str, seconds: int = 120) -> None:
    """For processes of their own, whose progress shows in files only."""
    for _ in range(seconds * 20):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f'waited {seconds} s for {what}')
