"""accelerate: two processes over gloo take the step that one process takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .small import batch, make

pytest.importorskip('accelerate')
pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.small import batch, make

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2, accelerator.num_processes
model = make().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(*batch(4)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
accelerator.end_training()
"""


def test_two_processes(tmp_path):
    script = tmp_path / 'train.py'
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    # accelerate's own launcher starts several processes on a CPU by mpirun alone
    launch = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone']
    command = [*launch, str(script), str(tmp_path / 'weights.pt')]
    environment = {**os.environ, 'PYTHONPATH': str(root)}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = torch.load(tmp_path / 'weights.pt')
    model, (x, y) = make().train(), batch(4)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
