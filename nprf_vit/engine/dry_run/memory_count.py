"""The memory of an update, counted tensor by tensor on fake ones: shapes, dtypes and lifetimes without numbers."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nprf_vit.data.batch import Batch
from nprf_vit.engine.build import Training
from nprf_vit.engine.optimizer import build_optimizer

# What the opaque backward of attention holds beside its results: the scaled gradients, these and the values with a
# column more, and a copy without it, each as large as the values. Its tiles are a few megabytes.
_INSIDE_BACKWARD = 4
# glibc's heap holds about a quarter more than is in use, in holes between tensors. By mallinfo2: 21 % for a batch of 8
# of nprf_deit_tiny, 28 % for fashion_mnist.yaml, where the tensors of the same updates were counted to within 3 %.
# Tensors above 32 MiB lie outside the heap, so large batches may have less.
_HOLES = 0.25
# of fake tensors, where an operation looks at numbers or is not known to them
_REFUSALS = (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError, AttributeError)


class CannotCount(Exception):
    """A model, a loss or an optimizer that does not run on fake tensors."""


class MemoryCount(NamedTuple):
    """Bytes on one device at the peak of an update; `activations` are all tensors that are none of the others."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    activations: int
    allocator: int  # what it holds besides

    @property
    def total(self) -> int:
        return sum(self)


def count_memory(run: Training) -> MemoryCount:
    """Count an update of a run at its per-device batch, without computing it.

    The second of two updates, forward and backward: the first one has no optimizer state beside its activations.
    A compiled model may need less.

    Raises:
        CannotCount: Where some operation does not run on fake tensors.
    """
    sample = run.task.synthetic_samples(run.config, run.model)[0, 0, 0]
    parts = [torch.as_tensor(x, device=run.place.device) for x in (sample.image, sample.target)]
    # autograd whose first use is on fake tensors starts threads, after which no forked process could use it
    torch.ones((), requires_grad=True).backward()
    fake = FakeTensorMode()

    def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        sizes = [((run.plan.micro, *x.shape), x.dtype, x.device) for x in parts]
        batch = Batch(*(torch.empty(shape, dtype=kind, device=where) for shape, kind, where in sizes))
        _update(run, model, optimizer, batch)

    with refusals(), FakeCopyMode(fake):
        model = copy.deepcopy(run.model).train()
    with fake:
        count = count_updates(model, lambda: build_optimizer(run.config, model), update)
    buckets = count.gradients if run.place.world > 1 else 0  # in which DistributedDataParallel sends them
    ema = 0 if run.ema is None else count.weights
    tensors = (count.weights, count.gradients + buckets, count.optimizer, ema, count.activations)
    return MemoryCount(*tensors, int(_HOLES * sum(tensors)) if run.place.device.type == 'cpu' else 0)


def count_updates(
    model: nn.Module,
    build: Callable[[], torch.optim.Optimizer],
    update: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> MemoryCount:
    """The tensors of the second of two updates of a model of fake ones, within its mode, on one device."""
    with refusals(), _Live() as live:
        weights = live.hold(model)
        optimizer = build()
        for _ in range(2):
            update(model, optimizer)
        state = _state_bytes(optimizer)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return MemoryCount(weights, gradients, state, 0, max(0, live.peak - weights - gradients - state), 0)


def count_forward(model: nn.Module, image: torch.Tensor) -> MemoryCount:
    """The tensors of a forward pass without gradients of a model of fake ones, within its mode."""
    with refusals(), torch.no_grad(), _Live() as live:
        weights = live.hold(model)
        model(image)
    return MemoryCount(weights, 0, 0, 0, live.peak - weights, 0)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What does not run on fake tensors is CannotCount."""
    try:
        yield
    except _REFUSALS as error:
        raise CannotCount(f'{type(error).__name__}: {error}'.splitlines()[0]) from error


def _update(run: Training, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    images, targets = run.task.mix(batch.images, batch.targets, 0, 0, 0)
    with run.autocast():
        logits = model(images)
    loss = run.task.loss(logits, targets)
    del logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in tree_leaves(dict(state))]
    storages = {x.untyped_storage() for x in values if isinstance(x, torch.Tensor)}
    return sum(storage.nbytes() for storage in storages)


class _Live(TorchDispatchMode):
    """Bytes of the storages that operations have returned and that are still referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: weakref.WeakSet = weakref.WeakSet()

    def hold(self, model: nn.Module) -> int:
        """Count parameters and buffers, which are there already; returns their bytes."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.add(tensor)
        return self.bytes

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._remove, storage.nbytes())
            self.peak = max(self.peak, self.bytes)

    def _remove(self, size: int) -> None:
        self.bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.bool:
            # optimizers ask for the number of a step, and pixel models for the range of bytes: no shape depends on it
            return 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        if func is torch.ops.nprf_vit.attend_backward.default:
            values = args[2]
            self.peak = max(self.peak, self.bytes + _INSIDE_BACKWARD * values.numel() * values.element_size())
        return out
