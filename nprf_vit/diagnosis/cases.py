"""What `doctor` checks every backend on, and what it writes down.

# B batch, K heads, N tokens, M features, D head dim, H×W grid
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from nprf_vit.ops import draw_projection, feature_map

BATCH, HEADS, M, D = 2, 2, 8, 6


@dataclass
class Case:
    """Inputs of one check, and the backends that serve them."""

    name: str
    backends: tuple[str, ...]
    grid: tuple[int, int] | None = None
    n: int = 0
    offsets: tuple[int, ...] = ()  # shape of the bias table
    far: bool = False
    causal: bool = False
    cells: tuple[int, int] | None = None

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """φ(q), φ(k), v and, if the case has them, bias and far; on the CPU. Only v is ever in half precision."""
        generator = torch.Generator().manual_seed(0)
        n = self.n or math.prod(self.grid or ())
        q, k, v = torch.randn(3, BATCH, HEADS, n, D, generator=generator, dtype=torch.float64)
        w = draw_projection(HEADS, M, D)
        options: dict[str, Any] = {'causal': self.causal, 'normalize': True}
        tensors = {
            'phi_q': feature_map(q, w, role='query', **options),
            'phi_k': feature_map(k, w, role='key', **options),
            'v': v,
        }
        if self.offsets:
            tensors['bias'] = torch.randn(HEADS, *self.offsets, generator=generator, dtype=torch.float64) / 2
        if self.far:
            tensors['far'] = torch.zeros(HEADS, dtype=torch.float64)
        wide = torch.promote_types(dtype, torch.float32)
        return {name: x.to(dtype if name == 'v' else wide) for name, x in tensors.items()}


CASES = [
    Case('7x5 grid', ('direct', 'fft', 'auto', 'flex', 'fused'), grid=(7, 5), offsets=(13, 9)),
    Case('1x1 grid', ('direct', 'fft', 'auto', 'fused'), grid=(1, 1), offsets=(1, 1)),
    Case('sequence', ('direct', 'fft', 'auto', 'flex', 'fused'), n=37, offsets=(73,)),
    Case('causal', ('direct', 'fft', 'step', 'auto', 'flex', 'fused'), n=600, offsets=(1199,), causal=True),
    Case('window', ('window', 'direct', 'fft', 'auto', 'fused'), grid=(9, 11), offsets=(5, 5), far=True),
    Case('causal window', ('window', 'direct', 'step', 'fused'), n=70, offsets=(9,), far=True, causal=True),
    Case('cells', ('cells', 'auto'), grid=(7, 9), offsets=(5, 7), cells=(3, 4)),
    Case('no bias', ('linear', 'direct', 'auto', 'fused'), grid=(6, 6)),
    Case('causal, no bias', ('linear', 'direct', 'step', 'auto', 'fused'), n=150, causal=True),
]


@dataclass
class Finding:
    """A line of the table that `--csv` writes."""

    device: str
    backend: str
    quantity: str
    case: str
    value: float
