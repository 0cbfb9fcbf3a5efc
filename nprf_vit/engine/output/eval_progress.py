"""How far an evaluation is, and how long it will still take."""

import contextlib
import sys
import time
from collections.abc import Generator, Iterable, Iterator

from tqdm import tqdm

from nprf_vit.data.batch import Batch
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.terminal import is_terminal

from .numbers import duration

_QUIET_SECONDS = 60  # between lines of a log file


def show_progress(
    batches: Iterable[Batch], place: Place, num_images: int | None, quiet_seconds: float = _QUIET_SECONDS
) -> Iterator[Batch]:
    """The batches as they are, while the main rank shows how many images all ranks have seen by its own.

    A bar with the time left where standard error is a terminal, and a line a minute where it is not.
    """
    if not place.is_main:
        yield from batches
        return
    show = _bar if is_terminal(sys.stderr) else _lines
    with contextlib.closing(show(num_images, quiet_seconds)) as shown:
        next(shown)
        seen = 0
        for batch in batches:
            yield batch  # returns when it has been evaluated
            seen += len(batch.images) * place.world
            shown.send(seen if num_images is None else min(seen, num_images))


def _bar(total: int | None, quiet_seconds: float) -> Generator[None, int, None]:
    with tqdm(total=total, desc='evaluating', unit=' images', leave=False, dynamic_ncols=True) as bar:
        while True:
            bar.update((yield) - bar.n)


def _lines(total: int | None, quiet_seconds: float) -> Generator[None, int, None]:
    started = last = time.perf_counter()
    while True:
        seen = yield
        now = time.perf_counter()
        if now - last < quiet_seconds or seen == total:
            continue
        last = now
        left = '' if total is None else f' of {total}, left {duration((now - started) / seen * (total - seen))}'
        with contextlib.suppress(OSError):  # the log may lie on the disk that is full
            print(f'evaluated {seen}{left}', file=sys.stderr, flush=True)
