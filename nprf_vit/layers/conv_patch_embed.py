"""Patches that overlap: a few small convolutions in place of one as large as the patch."""

from typing import Any

from timm.layers import LayerNorm2d, PatchEmbed, to_2tuple
from timm.models.vision_transformer_hybrid import ConvStem
from torch import nn


class ConvPatchEmbed(PatchEmbed):
    """timm's PatchEmbed with 3×3 convolutions of stride 2, log₂ of the patch size of them.

    Their widths double up to `embed_dim`; between them LayerNorm, pixel by pixel, and GELU. A norm over the batch would
    make a run depend on how its batch is cut, one over the image on its size and padding.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] | None = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, embed_dim, device=device, dtype=dtype, **kwargs)
        height, width = to_2tuple(patch_size)
        depth = height.bit_length() - 1
        if height != width or depth < 1 or height != 1 << depth or embed_dim % (1 << (depth - 1)):
            raise ValueError(
                f"stem='conv' halves the image and doubles {embed_dim} / 2^n channels: expected a square patch of 2, "
                f'4, 8, … pixels, got {height}x{width}'
            )
        channels = tuple(embed_dim >> (depth - 1 - i) for i in range(depth))
        options = {'norm_layer': LayerNorm2d, 'act_layer': nn.GELU, 'device': device, 'dtype': dtype}
        self.proj = ConvStem(in_chans, depth, channels, stride=(2,) * depth, **options)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """As timm's; the patch size is the number of convolutions and stays as it is."""
        if patch_size is not None and to_2tuple(patch_size) != to_2tuple(self.patch_size):
            size = 'x'.join(map(str, to_2tuple(self.patch_size)))
            raise ValueError(f"the patch size of a model with stem='conv' is fixed: expected {size}, got {patch_size}")
        super().set_input_size(img_size)
