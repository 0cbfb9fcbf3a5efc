"""Where this process stands among its peers, and the few collective operations a run needs."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import InputError


@dataclass(frozen=True)
class Place:
    """Rank, world size and device of this process. One process needs no process group."""

    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; every rank gets it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """True on all ranks when it is true on one, so that all of them turn together."""
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor([int(flag)], device=self.device)).item())


def _choose_device(wanted: str, local_rank: int) -> torch.device:
    if wanted == 'cpu' or (wanted == 'auto' and not torch.cuda.is_available()):
        return torch.device('cpu')
    if not torch.cuda.is_available():
        raise InputError('device cuda was asked for, but torch sees no CUDA device')
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f'local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}; '
            'lower --nproc-per-node to that number'
        )
    torch.cuda.set_device(local_rank)
    return torch.device('cuda', local_rank)


@contextlib.contextmanager
def process_group(device: str = 'auto', threads: int | None = None, timeout_minutes: float = 30) -> Iterator[Place]:
    """Join the group that torchrun's environment describes (NCCL on GPUs, gloo on CPUs), and leave it at the end."""
    if threads is not None:
        torch.set_num_threads(threads)
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    local_rank = int(os.environ.get('LOCAL_RANK', 0))
    place = Place(rank, world, local_rank, _choose_device(device, local_rank))
    if world == 1:
        yield place
        return
    on_gpu = place.device.type == 'cuda'
    dist.init_process_group(
        'nccl' if on_gpu else 'gloo',
        timeout=timedelta(minutes=timeout_minutes),
        device_id=place.device if on_gpu else None,
    )
    try:
        yield place
    finally:
        dist.destroy_process_group()
