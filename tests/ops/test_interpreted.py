"""tests/interpreted in a process of its own: Triton decides on import whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('triton')
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize('which', ['not slow', pytest.param('slow', marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(which):
    command = [sys.executable, '-m', 'pytest', 'tests/interpreted', '-x', '-p', 'no:cacheprovider', '-m', which]
    environment = os.environ | {'TRITON_INTERPRET': '1', 'OMP_NUM_THREADS': '1'}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert ' passed' in result.stdout
