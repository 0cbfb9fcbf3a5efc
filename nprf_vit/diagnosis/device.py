"""What only the device at hand can tell of a backend: the same bits twice, memory, host reads, CUDA graphs.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from nprf_vit.errors import first_line
from nprf_vit.ops import kernel_attention

BATCH, HEADS, SIDE, M, D, RADIUS, CELLS = 4, 4, 14, 32, 64, 3, 4
# FlexAttention scatters the bias gradient with atomics; decoding has no gradients.
_NOT_PROMISED = ('flex', 'step')

Step = Callable[[], tuple[torch.Tensor, ...]]


class Examination(NamedTuple):
    """What was found of one backend; None where the device has no way to tell."""

    same_bits: bool
    peak_mb: float | None
    host_read: str | None  # what the host would wait for; '' for nothing
    capture: str | None  # why a CUDA graph does not hold the step; '' if one does

    def faults(self) -> list[str]:
        found = [] if self.same_bits else ['two runs differ']
        found += [f'the host reads: {self.host_read}'] if self.host_read else []
        return found + ([f'no CUDA graph: {self.capture}'] if self.capture else [])

    def quantities(self) -> dict[str, float]:
        """Numbers for the table."""
        found = {'same bits': float(self.same_bits)}
        if self.peak_mb is not None:
            found['peak MB'] = self.peak_mb
        if self.host_read is not None:
            found['host reads'] = float(bool(self.host_read))
        if self.capture is not None:
            found['graph capture'] = float(not self.capture)
        return found

    def __str__(self) -> str:
        memory = '' if self.peak_mb is None else f', {self.peak_mb:.0f} MB'
        known = ', nothing read on the host' if self.host_read == '' else ''
        known += ', captured in a CUDA graph' if self.capture == '' else ''
        return '; '.join(self.faults()) or f'same bits twice{memory}{known}'


def training_step(backend: str, device: str) -> Step:
    """Forward and backward of a layer's attention with the bias that the backend serves; output and gradients."""
    generator = torch.Generator().manual_seed(0)
    n = SIDE * SIDE
    phi_q, phi_k = (torch.rand(BATCH, HEADS, n, M, generator=generator) + 0.1 for _ in range(2))
    tensors = {'phi_q': phi_q, 'phi_k': phi_k, 'v': torch.randn(BATCH, HEADS, n, D, generator=generator)}
    if backend != 'linear':
        side = {'window': 2 * RADIUS + 1, 'cells': 2 * CELLS - 1}.get(backend, 2 * SIDE - 1)
        tensors['bias'] = torch.randn(HEADS, side, side, generator=generator) * 0.1
    if backend == 'window':
        tensors['far'] = torch.zeros(HEADS)
    leaves = {name: x.to(device).requires_grad_() for name, x in tensors.items()}
    cells = (CELLS, CELLS) if backend == 'cells' else None
    upstream = torch.randn(BATCH, HEADS, n, D, generator=generator).to(device)

    def step() -> tuple[torch.Tensor, ...]:
        z = kernel_attention(**leaves, grid_size=(SIDE, SIDE), backend=backend, cells=cells)
        return z.detach(), *torch.autograd.grad(z, list(leaves.values()), upstream)

    return step


def examine(backend: str, device: str) -> Examination | None:
    """Runs a training step as often as it takes; None for a backend that makes no promise."""
    if backend in _NOT_PROMISED:
        return None
    step = training_step(backend, device)
    same = all(torch.equal(a, b) for a, b in zip(step(), step()))
    if torch.device(device).type != 'cuda':
        return Examination(same, None, None, None)
    return Examination(same, peak_megabytes(step), host_read(step), capture_fault(step))


def peak_megabytes(step: Step) -> float:
    """Memory that the step takes at once beyond its inputs, by the allocator's own count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def host_read(step: Step) -> str:
    """The first line of what PyTorch says when the host must wait for the device; '' if it never has to."""
    torch.cuda.set_sync_debug_mode('error')
    try:
        step()
    except RuntimeError as error:
        return first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode('default')
    return ''


def capture_fault(step: Step) -> str:
    """Why a CUDA graph of the step cannot be made, or does not repeat its bits; '' if it does."""
    expected = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch.cuda.graph asks: a warm-up outside the default stream
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = step()
        for x in captured:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return first_line(error)
    return '' if all(torch.equal(a, b) for a, b in zip(expected, captured)) else 'a replay differs from the step itself'
