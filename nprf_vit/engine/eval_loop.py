"""Evaluation that counts every image exactly once, whatever the number of ranks."""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from nprf_vit.data.batch import Batch, SampleFault
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.distributed.watchdog import Phase
from nprf_vit.engine.optimizer import Autocast
from nprf_vit.engine.tasks.base import Task
from nprf_vit.engine.transfer import BatchTransfer
from nprf_vit.errors import BadImage

Observer = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
Sums = dict[tuple[str, str], torch.Tensor]  # by the prefix of a model and the name of a sum


@torch.no_grad()
def evaluate(
    models: dict[str, nn.Module],
    batches: Iterable[Batch],
    task: Task,
    place: Place,
    num_images: int | None,
    autocast: Autocast = contextlib.nullcontext,
    interrupted: Callable[[], bool] = lambda: False,
    observe: Observer | None = None,
) -> dict[str, float] | None:
    """Metrics of several models (the model and its EMA) from one pass over the data; None if interrupted.

    An image that cannot be read is an error after the pass, with all such images named: an average over fewer images
    would pass for the real one.

    Args:
        models: prefix of the metrics' names → model, e.g. {'': model, 'ema_': ema}.
        batches: this rank's share; a stream's batches have no indices.
        num_images: how many images all ranks together must see; None for a stream that does not say.
        interrupted: asked before every batch; when one rank says yes, all of them leave without a result.
        observe: told of every batch the model's prefix, the logits, the targets and the indices.
    """
    training = {prefix: model.training for prefix, model in models.items()}
    for model in models.values():
        model.eval()
    sums: Sums = {}
    transfer = BatchTransfer(place.device, task.prepare)
    seen = torch.zeros(num_images or 0, dtype=torch.int32)
    faults: list[SampleFault] = []
    count, left = 0, False
    for batch in batches:
        place.heartbeat.enter(Phase.EVALUATION)
        left = interrupted()
        if left:
            break
        count += len(batch.images)
        faults += batch.faults
        if batch.indices is not None:
            seen += torch.bincount(batch.indices, minlength=len(seen)).int()
        images, targets = transfer(batch)
        for prefix, model in models.items():
            with autocast():
                logits = model(images)
            if place.device.type == 'mps':  # which has no float64
                logits, targets = logits.cpu(), targets.cpu()
            for name, value in task.measure(logits, targets, batch.indices).items():
                sums[prefix, name] = sums.get((prefix, name), 0) + value
            if observe is not None:
                observe(prefix, logits, targets, batch.indices)
    for prefix, model in models.items():
        model.train(training[prefix])
    place.heartbeat.enter(Phase.SUMMING)
    if place.any(left):
        return None
    _refuse_unreadable(place.gather(faults) if place.any(bool(faults)) else [])
    return _combine(sums, count, seen, task, place, num_images, tuple(models))


def _combine(
    sums: Sums,
    count: int,
    seen: torch.Tensor,
    task: Task,
    place: Place,
    num_images: int | None,
    prefixes: tuple[str, ...],
) -> dict[str, float]:
    names = _agree_on_names(sums, place)
    local = [float(sums.get(name, 0.0)) for name in names]
    where = place.device if place.world > 1 else 'cpu'
    totals = place.sum(torch.tensor([*local, count], dtype=torch.float64, device=where)).tolist()
    images = int(totals.pop())
    if len(seen):
        seen = place.sum(seen.to(where))
        assert images == num_images and bool((seen == 1).all()), (
            f'evaluation saw {images} of {num_images} images, {int((seen == 0).sum())} never, '
            f'{int((seen > 1).sum())} more than once'
        )
    metrics: dict[str, float] = {}
    for prefix in prefixes:
        own = {name: total for (owner, name), total in zip(names, totals) if owner == prefix}
        metrics |= {prefix + name: value for name, value in task.summarize(own, images).items()}
    return {**metrics, 'images': images}


def _agree_on_names(sums: Sums, place: Place) -> list[tuple[str, str]]:
    """The sums' names in one order on all ranks: a rank with more peers than images has none of its own."""
    names = sorted(sums)
    return max(place.gather(names), key=len)


def _refuse_unreadable(faults: list[list[SampleFault]]) -> None:
    texts = [fault.problem for part in faults for fault in part]
    if texts:
        more = f' and {len(texts) - 5} more' if len(texts) > 5 else ''
        raise BadImage(
            f'{len(texts)} validation images cannot be read, and without them the result would be another: '
            f'{"; ".join(texts[:5])}{more}'
        )
