"""Ranks find each other in a store that still holds what the group before them left."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from nprf_vit.engine.distributed.rendezvous import rendezvous
from nprf_vit.errors import RunError


def start(server, world):
    """All ranks of a group, each with its own connection; the names of their stores."""
    names, timeout = {}, timedelta(seconds=20)

    def join(rank):
        mine = rendezvous(server.clone(), rank, world, timeout)
        mine.set(f'from {rank}', 'x')
        mine.wait([f'from {other}' for other in range(world)])
        names[rank] = mine

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(range(world))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_every_start_has_a_store_of_its_own():
    server = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    for world in (3, 3, 2, 4):
        stores = start(server, world)
        assert len(stores) == world
        assert not stores[0].check(['mark'])  # the one before left its mark elsewhere
        stores[world - 1].set('mark', '1')
        for store in stores.values():
            store.wait(['mark'], timedelta(seconds=20))


def test_a_rank_that_does_not_come():
    server = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    start(server, 2)
    for rank in (0, 1):
        with pytest.raises(RunError, match=f'rank {rank} waited in vain'):
            rendezvous(server.clone(), rank, 2, timedelta(seconds=0.3))
