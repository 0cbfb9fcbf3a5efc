"""Between host and device, without either waiting for the other where the device allows it."""

from collections.abc import Callable
from typing import Any

import torch

from nprf_vit.data.batch import Batch

ASYNC_DEVICES: tuple[str, ...] = ('cuda',)  # that copy to the host while they compute


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor of the host. From memory that is not page-locked, CUDA would wait for all work under way."""
    if device.type == 'cuda' and torch.cuda.is_available():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class HostCopy:
    """A few numbers on their way from the device, which goes on meanwhile; `read` waits until they are there."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: Any = None
        self._numbers: list[float] | None = None
        goes_on = values.device.type in ASYNC_DEVICES
        self._values = values.to('cpu', non_blocking=goes_on)  # into page-locked memory
        if goes_on:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        if self._numbers is None:
            if self._event is not None:
                self._event.synchronize()
            self._numbers = self._values.tolist()
        return self._numbers


class BatchTransfer:
    """Brings images and targets to the device and makes of the images what the model takes.

    On CUDA in a stream of its own: the host asks for the next batch while the device still computes on the last one.

    Args:
        prepare: The last part of the transform, `Task.prepare`.
    """

    def __init__(self, device: torch.device, prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.device, self.prepare = device, prepare
        self._stream: Any = None
        if device.type == 'cuda' and torch.cuda.is_available():
            self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stream is None:
            return self._move(batch)
        with torch.cuda.stream(self._stream):
            moved = self._move(batch)
        present = torch.cuda.current_stream(self.device)
        present.wait_stream(self._stream)
        for tensor in moved:
            tensor.record_stream(present)  # or the other stream would take its memory for the next batch too early
        return moved

    def _move(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images = self.prepare(batch.images.to(self.device, non_blocking=True))
        for i, (top, left, values) in batch.erased:
            height, width = values.shape[1:]
            images[i, :, top : top + height, left : left + width] = values.to(self.device, non_blocking=True)
        return images, batch.targets.to(self.device, non_blocking=True)
