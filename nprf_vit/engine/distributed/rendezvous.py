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


def meet(
    store: dist.Store, rank: int, world: int, timeout: timedelta, alive: Callable[[], None] = lambda: None
) -> dist.Store:
    """The part of `store` that belongs to this start; returns when all ranks are there.

    Every rank shows a word made up for the occasion. Rank 0 reads them out with a word of its own until each of the
    others has heard its present word and said so. `alive` is called whenever the store has answered.
    """
    deadline = time.monotonic() + timeout.total_seconds()

    def pause() -> None:
        alive()
        if time.monotonic() > deadline:
            raise RunError(f'rank {rank} waited in vain for the other ranks to start')
        time.sleep(_PAUSE)

    own = uuid.uuid4().hex
    store.set(f'hello/{rank}', own)
    name = _call(store, own, world, pause) if rank == 0 else _answer(store, rank, own, pause)
    return dist.PrefixStore(f'start/{name}', store)


def _call(store: dist.Store, own: str, world: int, pause: Callable[[], None]) -> str:
    others = range(1, world)
    said = None
    while True:
        words = {rank: _read(store, f'hello/{rank}') for rank in others}
        if words != said:
            store.set('roster', json.dumps({'name': own, 'words': words}))
            said = words
        if all(_read(store, f'heard/{rank}') == f'{own} {words[rank]}' for rank in others):
            store.set(f'complete/{own}', '1')
            return own
        pause()


def _answer(store: dist.Store, rank: int, own: str, pause: Callable[[], None]) -> str:
    while True:
        roster = json.loads(_read(store, 'roster') or '{"name": "", "words": {}}')
        if roster['words'].get(str(rank)) == own:
            store.set(f'heard/{rank}', f'{roster["name"]} {own}')
            if _read(store, f'complete/{roster["name"]}'):
                return roster['name']
        pause()


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ''
