"""A store for this start of the group alone.

torchrun's agents keep one store over all restarts of their workers, and each agent counts its own failures only.
Addresses that a dead worker left behind would be taken for those of its successor, so the ranks first agree on a name
that none of their predecessors can have used.
"""

import json
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from nprf_vit.errors import RunError

_PAUSE = 0.05  # seconds


def rendezvous(
    store: dist.Store, rank: int, world: int, timeout: timedelta, alive: Callable[[], None] = lambda: None
) -> dist.Store:
    """The part of `store` that belongs to this start; returns when all ranks are there.

    Each rank publishes a nonce. Rank 0 publishes the roster of nonces, under its own as the name of this start, until
    every rank has acknowledged the roster that has its present nonce.

    Args:
        alive: Called whenever the store has answered.
    """
    deadline = time.monotonic() + timeout.total_seconds()

    def pause() -> None:
        alive()
        if time.monotonic() > deadline:
            raise RunError(f'rank {rank} waited in vain for the other ranks to start')
        time.sleep(_PAUSE)

    nonce = uuid.uuid4().hex
    store.set(f'nonce/{rank}', nonce)
    name = _publish_roster(store, nonce, world, pause) if rank == 0 else _acknowledge(store, rank, nonce, pause)
    return dist.PrefixStore(f'start/{name}', store)


def _publish_roster(store: dist.Store, name: str, world: int, pause: Callable[[], None]) -> str:
    others = range(1, world)
    published = None
    while True:
        nonces = {rank: _read(store, f'nonce/{rank}') for rank in others}
        if nonces != published:
            store.set('roster', json.dumps({'name': name, 'nonces': nonces}))
            published = nonces
        if all(_read(store, f'acknowledged/{rank}') == f'{name} {nonces[rank]}' for rank in others):
            store.set(f'complete/{name}', '1')
            return name
        pause()


def _acknowledge(store: dist.Store, rank: int, nonce: str, pause: Callable[[], None]) -> str:
    while True:
        roster = json.loads(_read(store, 'roster') or '{"name": "", "nonces": {}}')
        if roster['nonces'].get(str(rank)) == nonce:
            store.set(f'acknowledged/{rank}', f'{roster["name"]} {nonce}')
            if _read(store, f'complete/{roster["name"]}'):
                return roster['name']
        pause()


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ''
