"""Rank, world size and device of this process, and the few collective operations a run needs."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nprf_vit.errors import InputError, RunError, first_line
from nprf_vit.processes import die_with_parent

from .rendezvous import rendezvous
from .watchdog import Heartbeat, Phase, Watchdog

T = TypeVar('T')
_BACKENDS = {'cpu': 'gloo', 'cuda': 'nccl', 'xpu': 'xccl'}  # by which ranks exchange tensors


@dataclass(frozen=True)
class Place:
    """Rank, world size and device of this process. One process needs no process group."""

    rank: int
    world: int
    device: torch.device
    store: dist.Store | None = field(default=None, compare=False)  # what ranks tell each other outside collectives
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)

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
        """True on all ranks if it is true on one, so that all of them take the same branch."""
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor([int(flag)], device=self.device)).item())

    def gather(self, value: T) -> list[T]:
        """What each rank has, by rank, on all ranks."""
        if self.world == 1:
            return [value]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, value)
        return everyone

    def from_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on the main rank, on all ranks. Its InputError too: nobody waits for a rank that left."""
        if self.world == 1:
            return work()
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = work()
            except InputError as error:
                box[1] = str(error)
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise InputError(box[1])
        return box[0]

    def set_flag(self, name: str) -> None:
        """Where ranks that are not in a collective operation can see it."""
        if self.store is not None:
            self.store.set(name, '1')

    def has_flag(self, name: str) -> bool:
        return self.store is not None and self.store.check([name])


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """The device of this process: 'cpu', a kind of accelerator, or 'auto' for the one that torch offers, if any."""
    offered = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted == 'cpu' or (wanted == 'auto' and offered is None):
        return torch.device('cpu')
    if offered is None or wanted not in ('auto', offered.type):
        seen = f'no {wanted.upper()} device' + (f', only {offered.type}' if offered else '')
        raise InputError(f'device {wanted} was asked for, but torch sees {seen}')
    if local_rank >= torch.accelerator.device_count():
        raise InputError(
            f'local rank {local_rank} has no GPU: this node has {torch.accelerator.device_count()}; '
            'lower --nproc-per-node to that number'
        )
    if offered.type == 'mps':
        return torch.device('mps')  # there is one, without a number
    torch.get_device_module(offered).set_device(local_rank)
    return torch.device(offered.type, local_rank)


@contextlib.contextmanager
def process_group(device: str = 'auto', threads: int | None = None, stall_timeout: float = 1800) -> Iterator[Place]:
    """Join the group that torchrun's environment describes (NCCL on CUDA, gloo on CPUs), and leave it at the end.

    Args:
        stall_timeout: Seconds after which a rank that stays in one phase is reported and the process ends.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if 'TORCHELASTIC_RUN_ID' in os.environ:
        die_with_parent()  # or workers of a killed agent would go on writing beside the group that replaces them
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    chosen = choose_device(device, int(os.environ.get('LOCAL_RANK', 0)))
    if world > 1 and chosen.type not in _BACKENDS:
        raise InputError(f'{world} processes cannot be joined on {chosen.type}: start one, or --set device=cpu')
    heartbeat = Heartbeat()
    with Watchdog(heartbeat, rank, world, stall_timeout) as watchdog:
        if world == 1:
            yield Place(rank, world, chosen, heartbeat=heartbeat)
            return
        # collectives wait longer than the watchdog, which knows more about who is missing
        patience = timedelta(seconds=2 * stall_timeout + 60)
        store = _own_store(rank, world, patience, heartbeat)
        address = f'{os.environ.get("MASTER_ADDR")}:{os.environ.get("MASTER_PORT")}'
        watchdog.follow(dist.PrefixStore('heartbeats', store.clone()), address)
        dist.init_process_group(
            _BACKENDS[chosen.type],
            store=dist.PrefixStore('group', store),
            rank=rank,
            world_size=world,
            timeout=patience,
            device_id=None if chosen.index is None else chosen,
        )
        try:
            yield Place(rank, world, chosen, dist.PrefixStore('flags', store), heartbeat)
        finally:
            dist.destroy_process_group()


def _own_store(rank: int, world: int, patience: timedelta, heartbeat: Heartbeat) -> dist.Store:
    """The part of the store that belongs to this start of the group."""
    try:
        store, _, _ = next(dist.rendezvous('env://', timeout=patience))
        # waiting for the others is no stall as long as the store answers
        return rendezvous(store, rank, world, patience, lambda: heartbeat.enter(Phase.JOINING))
    except (dist.DistError, OSError) as error:
        raise RunError(f'rank {rank} cannot join the group: {first_line(error)}') from error
