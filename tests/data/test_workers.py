"""Loader workers and signals: deaf to those of a scheduler, gone when their parent is."""

import os
import signal
import subprocess
import sys

import pytest
from torch.utils.data import DataLoader

from nprf_vit.data.workers import setup_worker

# as a run would: persistent workers whose iterator still lives when the interpreter ends
ENDING = """
from torch.utils.data import DataLoader
from nprf_vit.data.workers import setup_worker
loader = DataLoader(range(8), num_workers=2, worker_init_fn=setup_worker, persistent_workers=True)
held = [iter(loader)]
next(held[0])
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_does_not_end_a_worker(number):
    loader = DataLoader(range(100), num_workers=1, worker_init_fn=setup_worker)
    batches = iter(loader)
    next(batches)
    os.kill(batches._workers[0].pid, number)
    assert len(list(batches)) == 99


def test_the_end_of_the_parent_is_theirs():
    done = subprocess.run([sys.executable, '-c', ENDING], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
