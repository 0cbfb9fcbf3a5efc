"""A backward on made-up images before the first step, for what DistributedDataParallel has to know of a model."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from nprf_vit.config.schema import Config
from nprf_vit.data.batch import Batch
from nprf_vit.engine.tasks.base import Task

from .optimizer import Autocast
from .transfer import BatchTransfer


def warm_up(config: Config, model: nn.Module, wrapped: nn.Module, task: Task, autocast: Autocast, size: int) -> None:
    """Show DDP in which order gradients come, and drop them.

    From its second forward on DDP sums gradients in buckets by that order, and beyond two ranks the rounding of a sum
    depends on the bucket. After a warm-up every step of every process has these buckets, so that a continuation rounds
    as the run that it continues.

    Args:
        wrapped: `model` in DDP, perhaps compiled.
        size: Images per micro-batch, as in training: a compiled model would be compiled for another.
    """
    with _without_traces(model):
        _backward(config, model, wrapped, task, autocast, size)


def unused_parameters(config: Config, model: nn.Module, task: Task, autocast: Autocast) -> list[str]:
    """The parameters that get no gradient, for which DDP would wait in vain."""
    with _without_traces(model):
        _backward(config, model, model, task, autocast, config.mixup_block if config.mixes else task.smallest_batch)
        return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def _backward(config: Config, model: nn.Module, wrapped: nn.Module, task: Task, autocast: Autocast, size: int) -> None:
    sample = task.synthetic_samples(config, model)[0, 0, 0]
    transfer = BatchTransfer(next(model.parameters()).device, task.prepare)
    parts = [torch.as_tensor(part) for part in (sample.image, sample.target)]
    batch = Batch(*(part.expand(size, *part.shape).clone() for part in parts))
    images, targets = task.mix(*transfer(batch), 0, 0, 0)
    with autocast():
        logits = wrapped(images)
    task.loss(logits, targets).backward()


@contextlib.contextmanager
def _without_traces(model: nn.Module) -> Iterator[None]:
    """As in training; afterwards without gradients, and with the buffers as they were: batch norm's would move."""
    training, buffers = model.training, [buffer.clone() for buffer in model.buffers()]
    model.train()
    try:
        yield
    finally:
        model.train(training)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers):
                buffer.copy_(before)
        for parameter in model.parameters():
            parameter.grad = None
