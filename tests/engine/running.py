"""Short real runs for tests: scikit-learn's digits, in this process or under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from nprf_vit.engine.config_file import dump_config, make_config
from nprf_vit.engine.distributed import Place
from nprf_vit.engine.train import train

ROOT = Path(__file__).resolve().parents[2]
ONE = Place(rank=0, world=1, local_rank=0, device=torch.device('cpu'))

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


def launch(script: str, *args, processes: int = 1, expect: int = 0, **environment) -> subprocess.CompletedProcess:
    """Run train.py or validate.py as a user does, alone or under torchrun."""
    command = [sys.executable, str(ROOT / script)]
    if processes > 1:
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(processes)]
        command.append(str(ROOT / script))
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **environment}
    done = subprocess.run([*command, *map(str, args)], capture_output=True, text=True, env=env, timeout=600, cwd=ROOT)
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
