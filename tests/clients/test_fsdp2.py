"""FSDP2: `fully_shard` on two gloo processes gives the gradients of one process."""

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from .small import batch, make

pytestmark = pytest.mark.slow


def train_rank(rank, directory, kwargs):
    torch.set_num_threads(1)
    distributed.init_process_group('gloo', init_method=f'file://{directory}/store', rank=rank, world_size=2)
    mesh = distributed.init_device_mesh('cpu', (2,))
    model = make(**kwargs).train()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (t.chunk(2)[rank] for t in batch(4))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, f'{directory}/weights.pt')
    distributed.destroy_process_group()


@pytest.mark.parametrize('kwargs', [{}, {'rel_pos': 'layer'}, {'rel_pos_extend': 'extend', 'rel_pos_size': (3, 3)}])
def test_fully_shard(kwargs, tmp_path):
    torch.multiprocessing.spawn(train_rank, (str(tmp_path), kwargs), nprocs=2)
    found = torch.load(tmp_path / 'weights.pt')
    model, (x, y) = make(**kwargs).train(), batch(4)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
