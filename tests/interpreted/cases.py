"""Inputs for the fused ops, and comparison of output and gradients with the float64 oracle."""

# B batch, N tokens, K heads, M features, D head dim, H×W grid (N = H·W)
import torch

from nprf_vit.ops import kernel_attention, reference

# Float32 sums in another order: measured up to 5e-7, wide biases through logarithms up to 1e-4.
OUTPUT, GRADIENT = 2e-6, 5e-6


def make(grid=None, n=None, std=0.5, far=None, window=None, m=8, d=16, batch=2, heads=2, seed=0, dtype=torch.float32):
    """Positive features, values, and a bias table or window; a sequence has its table in one row."""
    generator = torch.Generator().manual_seed(seed)
    n = n or grid[0] * grid[1]
    phi_q, phi_k = (torch.rand(batch, heads, n, m, generator=generator) + 0.1 for _ in range(2))
    v = torch.randn(batch, heads, n, d, generator=generator).to(dtype)
    tensors = {'phi_q': phi_q, 'phi_k': phi_k, 'v': v}
    if std is not None:
        shape = window or ([2 * n - 1] if grid is None else [2 * s - 1 for s in grid])
        tensors['bias'] = std * torch.randn(heads, *shape, generator=generator)
    if window is not None:
        tensors['far'] = std * torch.randn(heads, generator=generator) if far is None else torch.full((heads,), far)
    return tensors


def upstream(z):
    return torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(z.dtype)


def run(tensors, **options):
    """Output and gradients by name, through `kernel_attention`."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    z = kernel_attention(**leaves, backend='fused', **options)
    return z.detach(), dict(zip(leaves, torch.autograd.grad(z, list(leaves.values()), upstream(z))))


def oracle(tensors, **options):
    """The same in float64, and Σ_j a_ij|v_j|, what an output's error is measured in."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    weights = reference.attention_weights(**{name: x for name, x in leaves.items() if name != 'v'}, **options)
    z = weights @ leaves['v']
    grad = upstream(z.to(tensors['v'].dtype)).double()
    grads = torch.autograd.grad(z, list(leaves.values()), grad, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves.values())]
    return z.detach(), dict(zip(leaves, grads)), (weights @ leaves['v'].abs()).detach()


def errors(tensors, result, **options):
    """The largest error of an output, of Σ_j a_ij|v_j|, and that of each gradient, of its norm."""
    z, grads = result
    expected, exact, scale = oracle(tensors, **options)
    output = ((z.double() - expected).abs() / scale).max().item()
    largest = max(g.norm() for g in exact.values())
    found = {}
    for name, g in grads.items():
        assert g.dtype == tensors[name].dtype and g.shape == tensors[name].shape
        # a gradient that is zero in truth, such as that of a one-entry bias, is held against the others
        norm = exact[name].norm() if exact[name].norm() > 1e-6 * largest else largest
        found[name] = ((g.double() - exact[name]).norm() / norm.clamp(min=1e-30)).item()
    return output, found


def assert_right(tensors, output=OUTPUT, gradient=GRADIENT, result=None, **options):
    """Every output within `output` of Σ_j a_ij|v_j|, every gradient within `gradient` of its norm."""
    error, found = errors(tensors, result or run(tensors, **options), **options)
    assert error <= output, f'output is off by {error:.2g}'
    for name, g in found.items():
        assert g <= gradient, f'gradient of {name} is off by {g:.2g}'
