"""Inputs for `kernel_attention`, and the assertions that hold a result against the float64 oracle."""

# B batch, N tokens, K heads, M features, D head dim, H×W grid (N = H·W)
from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from nprf_vit.ops import kernel_attention, reference

# Issue: 1e-3 of Σ_j a_ij |v_j| on every element, 1e-8 in float64. No FFT, no excuse: direct sums do ten times better.
FORWARD_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}
PLAIN_SUM_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}


@dataclass
class Case:
    """Arguments of one `kernel_attention` call."""

    phi_q: Tensor  # B, K, N, M
    phi_k: Tensor  # B, K, N, M
    v: Tensor  # B, K, N, D
    bias: Tensor | None = None
    far: Tensor | None = None
    grid_size: tuple[int, int] | None = None
    causal: bool = False
    cells: tuple[int, int] | int | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: t for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}

    def map(self, function) -> Case:
        return replace(self, **{name: function(t) for name, t in self.tensors().items()})

    def arguments(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def prefix(self, t: int) -> Case:
        """The first t tokens of a sequence, with the offsets that they use."""
        n = self.v.shape[2]
        return self.map(lambda x: x[:, :, :t] if x.dim() == 4 else x[:, n - t : n + t - 1])

    def run(self, backend='auto', **kwargs) -> Tensor:
        return kernel_attention(**self.arguments(), backend=backend, **kwargs)

    def weights(self) -> Tensor:
        """Normalized weights by the oracle, in float64 from the very values the case holds."""
        arguments = self.map(lambda t: t.detach().double()).arguments()
        del arguments['v']
        return reference.attention_weights(**arguments)  # B, K, N, N


def table_shape(n, grid_size=None) -> tuple[int, ...]:
    return (2 * n - 1,) if grid_size is None else (2 * grid_size[0] - 1, 2 * grid_size[1] - 1)


def make_case(
    n=None,
    grid_size=None,
    causal=False,
    batch=2,
    heads=2,
    m=6,
    d=3,
    std=0.5,
    dtype=torch.float64,
    kind='prf',
    seed=0,
    cells=None,
) -> Case:
    """Features of random unit vectors, normal v, and a normal bias of standard deviation `std` (None: no bias)."""
    n = n or grid_size[0] * grid_size[1]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = torch.nn.functional.normalize(normal(2, batch, heads, n, max(d, 2)), dim=-1)
    phi_q, phi_k = reference.features(x, normal(heads, m, max(d, 2)), kind)
    v = normal(batch, heads, n, d)
    sizes = table_shape(cells if isinstance(cells, int) else n, cells if grid_size and cells else grid_size)
    bias = None if std is None else std * normal(heads, *sizes)
    return Case(phi_q, phi_k, v, bias, None, grid_size, causal, cells).map(lambda t: t.to(dtype))


def tolerance(backend: str, dtype: torch.dtype) -> float:
    plain_sum = backend in ('direct', 'linear', 'step') and dtype == torch.float32
    return PLAIN_SUM_TOLERANCE if plain_sum else FORWARD_TOLERANCE[dtype]


def assert_output(z: Tensor, case: Case, tol: float) -> None:
    """|z - oracle| ≤ tol · Σ_j a_ij |v_j| on every element."""
    a, v = case.weights(), case.v.detach().double()
    assert z.shape == v.shape, f'shape {tuple(z.shape)}, expected {tuple(v.shape)}'
    assert z.isfinite().all(), 'not finite'
    expected, scale = a @ v, a.abs() @ v.abs()
    # the smallest normal number stands in for elements whose every term is zero
    excess = (z.detach().double() - expected).abs() / (tol * scale).clamp_min(torch.finfo(torch.float32).tiny)
    assert excess.max() <= 1, f'error {excess.max() * tol:.2e} of the terms of its element, allowed {tol:.0e}'


def gradients(function, case: Case, cotangent: Tensor, names) -> dict[str, Tensor]:
    """Gradients of Σ function(case)·cotangent by each tensor named; zeros where the graph does not reach one."""
    case = case.map(torch.Tensor.detach)
    leaves = {name: case.tensors()[name].clone().requires_grad_() for name in names}
    z = function(replace(case, **leaves))
    grads = torch.autograd.grad(z, list(leaves.values()), cotangent.to(z.dtype), allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), grads)}


def assert_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tol: float) -> None:
    """‖g - oracle‖ ≤ tol · ‖oracle‖ for each; relative to the largest of them where the oracle's is truly zero."""
    largest = max(g.norm() for g in expected.values())
    for name, exact in expected.items():
        g = actual[name]
        assert g.shape == exact.shape, f'{name}: shape {tuple(g.shape)}, expected {tuple(exact.shape)}'
        assert g.isfinite().all(), f'gradient of {name} is not finite'
        norm = exact.norm() if exact.norm() > 1e-12 * largest else largest
        error = (g.double() - exact).norm() / norm
        assert error <= tol, f'gradient of {name} is off by {error:.2e} of its norm, allowed {tol:.0e}'


def check(case: Case, backend: str, names=None, forward_tol=None, gradient_tol=None, **kwargs) -> None:
    """Output and gradients (of every tensor, unless `names` are given) against the oracle on the same values."""
    dtype = case.v.dtype
    assert_output(case.run(backend, **kwargs), case, forward_tol or tolerance(backend, dtype))
    names = list(case.tensors()) if names is None else names
    if not names:
        return
    cotangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    actual = gradients(lambda c: c.run(backend, **kwargs), case, cotangent, names)
    exact = gradients(
        lambda c: reference.attention(**c.arguments()), case.map(lambda t: t.double()), cotangent.double(), names
    )
    for name, g in actual.items():
        assert g.dtype == case.tensors()[name].dtype, f'gradient of {name} is {g.dtype}'
    assert_gradients(actual, exact, gradient_tol or GRADIENT_TOLERANCE[dtype])
