"""A pre-norm transformer block around `KernelAttention`, with the parameter names of timm's ViT block."""

from typing import Any

import torch
from timm.layers import DropPath, LayerNorm, LayerScale, Mlp
from torch import nn

from nprf_vit.ops.bias import AnyBias

from .attention import KernelAttention


class KernelBlock(nn.Module):
    """Attention and MLP, each with its norm, residual, layer scale and drop path.

    Tokens may be (B, H, W, C) or (B, N, C): only the attention looks.

    Args:
        dim: Number of channels.
        num_heads: Number of attention heads.
        mlp_ratio: Width of the MLP over dim.
        scale_attn_norm: A norm inside the attention, as in timm.
        scale_mlp_norm: A norm inside the MLP, as in timm.
        proj_drop: Rate of dropout after projections.
        attn_drop: Rate of dropout of attention weights.
        drop_path: Rate of stochastic depth.
        init_values: Initial layer scale, none if None.
        attn_layer: Ignored; timm's ViT passes its own.
        depth: Index of the block.
        **attn_kwargs: Passed to `KernelAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        scale_attn_norm: bool = False,
        scale_mlp_norm: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        act_layer: type[nn.Module] = nn.GELU,
        norm_layer: type[nn.Module] = LayerNorm,
        mlp_layer: type[nn.Module] = Mlp,
        attn_layer: Any = None,
        depth: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attn_kwargs: Any,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.norm1 = norm_layer(dim, **dd)
        self.attn = KernelAttention(
            dim,
            num_heads,
            scale_norm=scale_attn_norm,
            proj_bias=proj_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            norm_layer=norm_layer,
            depth=depth,
            **attn_kwargs,
            **dd,
        )
        self.ls1 = LayerScale(dim, init_values=init_values, **dd) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = norm_layer(dim, **dd)
        self.mlp = mlp_layer(
            in_features=dim,
            hidden_features=int(dim * mlp_ratio),
            act_layer=act_layer,
            norm_layer=norm_layer if scale_mlp_norm else None,
            bias=proj_bias,
            drop=proj_drop,
            **dd,
        )
        self.ls2 = LayerScale(dim, init_values=init_values, **dd) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self,
        x: torch.Tensor,
        bias: AnyBias | torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        grid_size: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Args: x (B, H, W, C) or (B, N, C); the others as `KernelAttention`'s. Returns the shape of x."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), bias, key_mask=key_mask, grid_size=grid_size)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
