"""Kernels that a GPU would be asked to start per attention layer, and reads by the host; counted without a GPU.

python -m benchmarks.launches [--json FILE]    every backend and size, beside SDPA, FlexAttention, eager softmax

Fake tensors on device 'cuda' run through each product and every operation that would start a kernel is counted; views
and allocations are not, a padding counts as two. `fused` is counted from the record of its launches and has the feature
maps in it; SDPA and FlexAttention are taken as known: one kernel forward, three and two backward. A value that the host
would have to read raises on a fake tensor: a synchronisation, at which counting ends. `fft` off the CPU is `direct`. An
estimate: PyTorch may start two kernels for one operation.

# B batch, K heads, N tokens, M features, D head dim
"""

import argparse
import json
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nprf_vit.ops.backends import batched, fused_support
from nprf_vit.ops.features import feature_map

HEADS, M, D, RADIUS = 12, 32, 64, 13
SIZES = {(14, 14): 128, (32, 32): 8, (64, 64): 1, (128, 128): 1}  # grid: batch
# These move no data and start nothing.
_FREE = {
    'view', '_unsafe_view', 'reshape', 'transpose', 'permute', 'slice', 'select', 'unsqueeze', 'squeeze', 'expand',
    'as_strided', 'detach', 'alias', 't', 'unbind', 'split', 'split_with_sizes', 'empty', 'empty_like', 'new_empty',
    'empty_strided', 'new_empty_strided', 'lift_fresh', 'unfold', 'view_as', 'is_same_size',
}  # fmt: skip
_TWICE = {'constant_pad_nd'}  # fills, then copies
_KNOWN = {'SDPA, no bias': (1, 3), 'FlexAttention': (1, 2)}
# What the tests hold: launches forward and backward, but for `direct` at 128×128.
LIMITS = {
    'fused': (3, 8), 'fused window': (3, 8),
    'direct': (40, 50), 'window': (40, 180), 'fft': (40, 50), 'cells': (54, 84),
}  # fmt: skip


class LaunchCounter(TorchDispatchMode):
    """Counts operations that start a kernel, the largest memory that one of them makes, and all that is alive."""

    def __init__(self):
        super().__init__()
        self.launches, self.largest, self.peak = 0, 0, 0
        self.made: dict[int, weakref.ref] = {}  # by id of the tensor
        self.given: set[int] = set()  # storages of the inputs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace != 'prim' and name not in _FREE:
            self.launches += 2 if name in _TWICE else 1
        for x in args:
            if isinstance(x, torch.Tensor) and id(x) not in self.made:
                self.given.add(x.untyped_storage()._cdata)
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel() * x.element_size())
                self.made[id(x)] = weakref.ref(x)
        self.peak = max(self.peak, self._alive())
        return out

    def _alive(self) -> int:
        """Bytes of what was made and is still held, the inputs and views of them apart."""
        storages = {}
        for key, reference in list(self.made.items()):
            x = reference()
            if x is None:
                del self.made[key]
            else:
                storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return sum(size for key, size in storages.items() if key not in self.given)


@dataclass
class Audit:
    """A row of the table."""

    backend: str
    grid: str
    batch: int
    direction: str
    launches: int
    host_reads: int
    largest_mb: float  # the largest single tensor
    peak_mb: float  # all that is alive at once but the inputs: the outputs too


def count(run: Callable[[], object]) -> tuple[int, int, float, float]:
    """Launches, host reads (counting ends at the first), and megabytes: the largest tensor, and all alive at once."""
    counter = LaunchCounter()
    reads = 0
    with counter:
        try:
            run()
        except DataDependentOutputException:
            reads = 1
    return counter.launches, reads, round(counter.largest / 2**20, 1), round(counter.peak / 2**20, 1)


def products(grid: tuple[int, int], batch: int) -> dict[str, tuple[Callable, Callable]]:
    """Forward and backward of each backend's plain product, on fake tensors."""
    n = grid[0] * grid[1]
    phi_q, phi_k = (torch.empty(batch, HEADS, n, M, device='cuda') for _ in range(2))
    v, z, grad = (torch.empty(batch, HEADS, n, D, device='cuda') for _ in range(3))
    den = torch.empty(batch, HEADS, n, device='cuda')
    bias = torch.empty(HEADS, 2 * grid[0] - 1, 2 * grid[1] - 1, device='cuda')
    table, far = torch.empty(HEADS, 2 * RADIUS + 1, 2 * RADIUS + 1, device='cuda'), torch.empty(HEADS, device='cuda')

    def plain(*biases, cells=None):
        inputs = phi_q, phi_k, v, *biases
        return (
            lambda: batched.attend(*inputs, grid, False, True, cells),
            lambda: batched.attend_backward(*inputs, z, den, grad, grid, False, True, cells),
        )

    return {
        'direct': plain(bias, None),
        'window': plain(table, far),
        'fft': plain(bias, None),
        'cells': plain(torch.empty(HEADS, 27, 27, device='cuda'), None, cells=(14, 14)),
        'softmax with a bias, eager': eager_softmax(grid, batch),
        'feature maps, plain': feature_maps(grid, batch),
    }


def eager_softmax(grid: tuple[int, int], batch: int) -> tuple[Callable, Callable]:
    """softmax(qkᵀ/√D + bias[offset])v with the bias gathered from its table."""
    n = grid[0] * grid[1]
    q, k, v = (torch.empty(batch, HEADS, n, D, device='meta', requires_grad=True) for _ in range(3))
    table = torch.empty(HEADS, (2 * grid[0] - 1) * (2 * grid[1] - 1), device='meta', requires_grad=True)
    index = torch.empty(n, n, dtype=torch.long, device='meta')

    def forward():
        return ((q @ k.transpose(-1, -2)) * D**-0.5 + table[:, index]).softmax(-1) @ v

    return forward, differentiated(forward, (q, k, v, table))


def feature_maps(grid: tuple[int, int], batch: int) -> tuple[Callable, Callable]:
    """φ of normalized queries and keys: what `fused` has inside and the other backends come on top of."""
    n = grid[0] * grid[1]
    q, k = (torch.empty(batch, HEADS, n, D, device='meta', requires_grad=True) for _ in range(2))
    w = torch.empty(HEADS, M, D, device='meta')

    def forward():
        return sum(feature_map(x, w, role=role, normalize=True) for x, role in ((q, 'query'), (k, 'key')))

    return forward, differentiated(forward, (q, k))


def differentiated(forward: Callable, inputs: tuple) -> Callable:
    """The backward alone, on meta tensors: without a GPU autograd's engine has no thread for fake CUDA ones."""
    out = forward()
    return lambda: torch.autograd.grad(out, inputs, torch.empty_like(out), retain_graph=True)


def audit(backends: list[str], sizes: dict[tuple[int, int], int]) -> list[Audit]:
    """Rows of every backend, size and direction."""
    rows = []
    for grid, batch in sizes.items():
        name = f'{grid[0]}x{grid[1]}'
        with FakeTensorMode():
            chosen = {b: runs for b, runs in products(grid, batch).items() if b in backends}
            for backend, runs in chosen.items():
                for direction, run in zip(('forward', 'backward'), runs):
                    rows.append(Audit(backend, name, batch, direction, *count(run)))
        for backend in ('fused', 'fused window'):
            if backend in backends and fused_support.AVAILABLE:
                rows += [Audit(backend, name, batch, *row) for row in count_fused(backend, grid, batch)]
        for backend in (b for b in _KNOWN if b in backends):
            for direction, launches in zip(('forward', 'backward'), _KNOWN[backend]):
                rows.append(Audit(backend, name, batch, direction, launches, 0, 0.0, 0.0))
    return rows


def count_fused(backend: str, grid: tuple[int, int], batch: int) -> list[tuple[str, int, int, float, float]]:
    """Direction, launches, host reads, megabytes of the largest tensor and of all, from the record of the launches."""
    from nprf_vit.ops.kernels.variants import Variant, launches_of  # imports Triton

    variant = Variant('window' if 'window' in backend else 'full', torch.bfloat16, M, D)
    rows = []
    for direction, launches in zip(('forward', 'backward'), launches_of(variant, batch, HEADS, grid)):
        tensors = [x for launch in launches for x in launch.arguments.values() if isinstance(x, torch.Tensor)]
        sizes = [x.numel() * x.element_size() / 2**20 for x in {id(x): x for x in tensors if x._base is None}.values()]
        rows.append((direction, len(launches), 0, round(max(sizes), 1), round(sum(sizes), 1)))
    return rows


ALL = [
    'fused',
    'fused window',
    'direct',
    'window',
    'fft',
    'cells',
    'feature maps, plain',
    'softmax with a bias, eager',
    *_KNOWN,
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.launches', description=__doc__.splitlines()[0])
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the rows there too')
    args = parser.parse_args(argv)
    rows = audit(ALL, SIZES)
    print(
        f'{"backend":<28}{"grid":<9}{"batch":>6}  {"direction":<10}{"launches":>9}{"host reads":>12}'
        f'{"largest MB":>12}{"alive MB":>10}'
    )
    for row in rows:
        print(f'{row.backend:<28}{row.grid:<9}{row.batch:>6}  {row.direction:<10}', end='')
        print(f'{row.launches:>9}{row.host_reads:>12}{row.largest_mb:>12}{row.peak_mb:>10}')
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + '\n', encoding='utf-8')


if __name__ == '__main__':
    main()
