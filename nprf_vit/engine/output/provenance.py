"""What a result was made with."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

from nprf_vit.version import __version__


def commit() -> str | None:
    """The commit of this project's checkout, with '+changes' when files differ from it; None outside one."""
    folder = Path(__file__).resolve().parent
    try:
        # an installed package may lie in a folder of somebody's repository: only where this file is tracked, it is ours
        _git(folder, 'ls-files', '--error-unmatch', Path(__file__).name)
        head = _git(folder, 'rev-parse', 'HEAD')
        changes = _git(folder, 'status', '--porcelain', '--untracked-files=no')
    except (OSError, subprocess.SubprocessError):
        return None
    return f'{head}+changes' if changes else head


def _git(folder: Path, *args: str) -> str:
    done = subprocess.run(['git', *args], cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _device_name() -> str:
    if not torch.accelerator.is_available():
        return platform.machine()
    name = getattr(torch.get_device_module(), 'get_device_name', None)
    return str(torch.accelerator.current_accelerator()) if name is None else name()


def provenance(world: int) -> dict[str, Any]:
    return {
        'command': sys.argv,
        'commit': commit(),
        'nprf_vit': __version__,
        'torch': torch.__version__,
        'timm': timm.__version__,
        'torchvision': torchvision.__version__,
        'python': platform.python_version(),
        'cuda': torch.version.cuda,
        'device': _device_name(),
        'world_size': world,
    }
