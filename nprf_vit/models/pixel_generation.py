"""Generation from a pixel transformer, byte by byte. B batch, E embedding dim, V levels of a byte."""

import torch
from torch import nn

from nprf_vit.layers.cached_attention import AttentionStep

from .pixel import PixelTransformer


class PixelDecoder:
    """Logits of one byte after another, from a cache of the bytes so far; without dropout and gradients.

    The numbers are those of `PixelTransformer.forward` at the same position, up to rounding.

    Args:
        model: The model.
        batch: Images to decode side by side.
    """

    def __init__(self, model: PixelTransformer, batch: int) -> None:
        self.model, self.batch, self.position = model, batch, 0
        self.steps = [AttentionStep(block.attn, model.bias_table(), model.length) for block in model.blocks]

    @torch.no_grad()
    def step(self, last: torch.Tensor | None = None) -> torch.Tensor:
        """The logits (B, V) of the next byte, given the last one (B,), which for the first byte is None."""
        model, t = self.model, self.position
        if (last is None) != (t == 0):
            raise ValueError(f'byte {t} needs {"no byte" if t == 0 else "the byte"} before it, got {last}')
        if t >= model.length:
            raise ValueError(f'all {model.length} bytes are decoded')
        if last is None:
            x = model.start_token[0].expand(self.batch, -1)  # B, E
        else:
            x = model.embed_bytes(last[:, None], first=t - 1)[:, 0]
        if model.pos_embed is not None:
            x = x + model.pos_embed[:, t]
        for block, attend in zip(model.blocks, self.steps):
            x = x + block.ls1(attend(block.norm1(x)))
            x = x + block.ls2(_mlp(block.mlp, block.norm2(x)))
        self.position += 1
        return model.forward_head(model.norm(x))


def _mlp(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """timm's Mlp without its dropout, so that decoding is the same in training mode."""
    return mlp.fc2(mlp.norm(mlp.act(mlp.fc1(x))))
