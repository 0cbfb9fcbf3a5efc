"""What random features make of a trained softmax model's attention: the radius they work at, the error of its rows."""

from collections.abc import Iterator, Sequence

import torch

from nprf_vit.layers import KernelAttention
from nprf_vit.models import KernelVisionTransformer


def seen_by_blocks(model: KernelVisionTransformer, images: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys (B, K, N, D) of every block, before they are normalized or scaled."""
    found = []

    def look(attn: KernelAttention, args: tuple) -> None:
        found.append(attn.project(args[0])[:2])

    hooks = [block.attn.register_forward_pre_hook(look) for block in model.blocks]
    model(images)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def radius(model: KernelVisionTransformer, images: torch.Tensor) -> float:
    """Length of queries and keys as the kernel sees them, mean over blocks: the R of the approximation figure."""
    if model.blocks[0].attn.normalize:
        return 1.0
    scale = model.blocks[0].attn.head_dim ** -0.25
    lengths = [(q.norm(dim=-1).mean() * k.norm(dim=-1).mean()).sqrt() * scale for q, k in seen_by_blocks(model, images)]
    return float(torch.stack(lengths).mean())


@torch.no_grad()
def row_errors(
    model: KernelVisionTransformer, converted: Sequence[KernelVisionTransformer], images: torch.Tensor
) -> list[float]:
    """Mean of ‖A-Â‖₁ (0 to 2) over all rows of all blocks, for each draw: the model's own queries and keys for both."""
    found = seen_by_blocks(model, images)
    shared = model.rel_pos_bias
    bias = 0.0 if shared is None else shared().matrix
    return [float(torch.stack(list(_errors(model, other, found, bias))).mean()) for other in converted]


def _errors(
    model: KernelVisionTransformer, other: KernelVisionTransformer, found: list, bias: torch.Tensor | float
) -> Iterator[torch.Tensor]:
    for block, twin, (q, k) in zip(model.blocks, other.blocks, found):
        attn = block.attn
        if attn.normalize:
            scores = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
        else:
            scores = q @ k.mT * attn.head_dim**-0.5
        exact = (scores + bias).softmax(-1)
        phi_q, phi_k = twin.attn.features(q, k)
        weights = phi_q @ phi_k.mT  # B, K, N, N
        if isinstance(bias, torch.Tensor):
            weights = weights * (bias - bias.amax(-1, keepdim=True)).exp()
        yield (exact - weights / weights.sum(-1, keepdim=True)).abs().sum(-1).mean()
