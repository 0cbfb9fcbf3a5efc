"""One attention layer on random inputs, and the ways to run it that benchmarks compare.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nprf_vit.ops import draw_projection, feature_map, kernel_attention

Run = Callable[[], object]


@dataclass
class Layer:
    """Queries, keys, values and a bias table of one layer; each method returns a function of no arguments."""

    grid: tuple[int, int] | None = None
    length: int = 0  # of a sequence, instead of a grid
    batch: int = 1
    heads: int = 1
    m: int = 32
    d: int = 64
    causal: bool = False
    backward: bool = False

    def __post_init__(self):
        torch.manual_seed(0)
        self.n = math.prod(self.grid) if self.grid else self.length
        shape = (self.batch, self.heads, self.n, self.d)
        self.q, self.k, self.v = (torch.randn(shape, requires_grad=self.backward) for _ in range(3))
        offsets = [2 * s - 1 for s in self.grid or (self.n,)]
        self.bias = (torch.randn(self.heads, *offsets) * 0.02).requires_grad_(self.backward)
        self.w = draw_projection(self.heads, self.m, self.d)
        self.upstream = torch.randn(shape)

    def run(self, attend: Callable[[], torch.Tensor], bias: bool = False) -> Run:
        """`attend`, followed by its gradients where the layer wants them, that of the bias included if it has one."""
        inputs = (self.q, self.k, self.v, *([self.bias] if bias else []))
        if self.backward:
            return lambda: torch.autograd.grad(attend(), inputs, self.upstream)
        return torch.no_grad()(attend)

    def features(self) -> tuple[torch.Tensor, torch.Tensor]:
        """φ(q̂) and φ(k̂), (B, K, N, M) each."""
        return tuple(
            feature_map(x, self.w, role=role, causal=self.causal, normalize=True)
            for x, role in ((self.q, 'query'), (self.k, 'key'))
        )

    def ours(self, backend: str = 'auto') -> Run:
        """Feature maps and kernelized attention with the bias."""

        def attend():
            return kernel_attention(*self.features(), self.v, self.bias, None, self.grid, self.causal, backend)

        return self.run(attend, bias=True)

    def ours_window(self, radius: int) -> Run:
        """The same with a bias that is constant beyond a radius, on a grid."""
        size, far = 2 * radius + 1, torch.zeros(self.heads)

        def attend():
            window = self.bias[:, :size, :size]  # which entries does not matter for the cost
            return kernel_attention(*self.features(), self.v, window, far, self.grid, self.causal)

        return self.run(attend, bias=True)

    def ours_cells(self, cells: tuple[int, int], backend: str = 'auto') -> Run:
        """The same with a bias between cells of a grid."""
        rows, cols = (2 * count - 1 for count in cells)

        def attend():
            table = self.bias[:, :rows, :cols]  # which entries does not matter for the cost
            options = {'grid_size': self.grid, 'backend': backend, 'cells': cells}
            return kernel_attention(*self.features(), self.v, table, **options)

        return self.run(attend, bias=True)

    def ours_without_bias(self) -> Run:
        return self.run(lambda: kernel_attention(*self.features(), self.v, causal=self.causal))

    def sdpa(self, mask: torch.Tensor | None = None) -> Run:
        """PyTorch's attention, without a bias or with a given dense one."""
        masking = {'attn_mask': mask, 'is_causal': self.causal and mask is None}
        return self.run(lambda: F.scaled_dot_product_attention(self.q, self.k, self.v, **masking))

    def softmax_stored(self) -> Run:
        """Attention as papers write it: the N×N matrix in memory."""
        scale = self.d**-0.5
        return self.run(lambda: ((self.q * scale) @ self.k.transpose(-1, -2)).softmax(-1) @ self.v)


def plain_fft(phi_q, phi_k, v, bias, grid):
    """The routine public code offers: all M·(D+1) channels at once, padded in both directions."""
    h, w = grid
    c = bias.exp()  # K, 2H-1, 2W-1
    kernel = c.flip(1, 2).roll((1 - h, 1 - w), (1, 2))  # K, 2H-1, 2W-1: offset δ at -δ modulo the size
    u = phi_k.unsqueeze(-1) * F.pad(v, (0, 1), value=1.0).unsqueeze(-2)  # B, K, N, M, D+1
    u = u.movedim(2, -1).unflatten(-1, (h, w))  # B, K, M, D+1, H, W
    f = torch.fft.rfft2(u, s=(2 * h - 1, 2 * w - 1)) * torch.fft.rfft2(kernel)[:, None, None]
    y = torch.fft.irfft2(f, s=(2 * h - 1, 2 * w - 1))[..., :h, :w].flatten(-2)  # B, K, M, D+1, N
    sums = torch.einsum('bknm,bkmen->bkne', phi_q, y)
    return sums[..., :-1] / sums[..., -1:]
