"""Causal transformer over the bytes of an image, as a timm model family.

B batch, C colour channels, H×W pixels, N = H·W·C bytes, E embedding dim, V levels of a byte.
Byte t is channel t % C of pixel (y, x) with t = (y·W + x)·C + c.
"""

from typing import Any

import torch
from timm.layers import LayerNorm, calculate_drop_path_rates, to_2tuple, trunc_normal_
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from torch import nn

from nprf_vit.layers import KernelBlock, RelPosBias, set_exportable
from nprf_vit.layers.attention import check_kernel
from nprf_vit.layers.rel_pos import check_rel_pos
from nprf_vit.ops.bias import Bias, DenseBias
from nprf_vit.ops.checks import has_values
from nprf_vit.ops.precision import without_autocast

__all__ = ['PixelTransformer', 'from_raster', 'to_raster']  # register_model adds the entry points


def to_raster(images: torch.Tensor) -> torch.Tensor:
    """Images (B, C, H, W) to bytes (B, H·W·C), pixel by pixel with the channels of a pixel side by side."""
    return images.permute(0, 2, 3, 1).flatten(1)


def from_raster(raster: torch.Tensor, in_chans: int, img_size: tuple[int, int]) -> torch.Tensor:
    """Bytes (B, H·W·C) to images (B, C, H, W)."""
    return raster.unflatten(1, (*img_size, in_chans)).permute(0, 3, 1, 2)


class PixelTransformer(nn.Module):
    """Predicts each byte of an image from those before it, all in one pass.

    The input is shifted by one: position t holds byte t-1, embedded by a table of its colour channel, and position 0
    a learned start token. Parameter names inside a block are those of timm's ViT.

    Args:
        img_size: Image size H×W.
        in_chans: Colour channels.
        levels: Values a byte may have.
        length: Bytes of the sequence, counted from its start; all H·W·C unless given.
        embed_dim, depth, num_heads, mlp_ratio: Size of the transformer.
        kernel: Attention kernel, see `nprf_vit.layers.KernelAttention`.
        normalize: Give queries and keys length one.
        rel_pos: Relative position bias 'shared' by all blocks, one per 'layer', or 'none'.
        pos_embed: Absolute position embedding, 'learn' or 'none'; by default learned where there is no bias.
        feature_dim: Number of random features per head.
        attn_backend: Algorithm of `nprf_vit.ops.kernel_attention`.
        seed: Seed of the random projections; block i draws from (seed, i).
        drop_rate: Dropout of the embedding, of the attention's output and in the MLP.
        drop_path_rate: Stochastic depth of the last block; earlier ones have less.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        in_chans: int = 3,
        levels: int = 256,
        length: int | None = None,
        embed_dim: int = 512,
        depth: int = 6,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        kernel: str = 'prf',
        normalize: bool = True,
        rel_pos: str = 'shared',
        pos_embed: str | None = None,
        feature_dim: int = 32,
        attn_backend: str = 'auto',
        seed: int = 0,
        drop_rate: float = 0.1,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.img_size, self.in_chans, self.levels = to_2tuple(img_size), in_chans, levels
        total = self.img_size[0] * self.img_size[1] * in_chans
        self.length = total if length is None else length
        pos_embed = pos_embed or ('learn' if rel_pos == 'none' else 'none')
        check_arguments(kernel, rel_pos, pos_embed, levels, self.length, total)
        self.kernel, self.rel_pos = kernel, rel_pos
        self.num_classes, self.num_features, self.embed_dim = levels, embed_dim, embed_dim
        self.head_hidden_size, self.grad_checkpointing = embed_dim, False

        self.embed = nn.Embedding(in_chans * levels, embed_dim, **dd)  # byte b of channel c is row c·V + b
        self.start_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        self.pos_embed = nn.Parameter(torch.empty(1, self.length, embed_dim, **dd)) if pos_embed == 'learn' else None
        self.embed_drop = nn.Dropout(drop_rate)
        # softmax under a shared bias gets its mask with the bias, once per forward instead of once per block
        self.masks_bias = kernel == 'softmax' and rel_pos == 'shared'
        self.rel_pos_bias = None
        if rel_pos == 'shared':
            self.rel_pos_bias = RelPosBias((self.length,), num_heads, dense=kernel == 'softmax', **dd)
        self.blocks = nn.Sequential(
            *(
                KernelBlock(
                    embed_dim,
                    num_heads,
                    mlp_ratio,
                    proj_drop=drop_rate,
                    drop_path=rate,
                    depth=i,
                    kernel=kernel,
                    normalize=normalize,
                    rel_pos_size=(self.length,) if rel_pos == 'layer' else None,
                    feature_dim=feature_dim,
                    attn_backend=attn_backend,
                    seed=seed,
                    causal=not self.masks_bias,
                    **dd,
                )
                for i, rate in enumerate(calculate_drop_path_rates(drop_path_rate, depth))
            )
        )
        self.norm = LayerNorm(embed_dim, **dd)
        self.head = nn.Linear(embed_dim, levels, **dd)
        self.init_weights(needs_reset=False)

    def init_weights(self, needs_reset: bool = True) -> None:
        """Draw all weights as timm's ViT does: truncated normal of deviation 0.02, biases zero.

        Args:
            needs_reset: Whether norms, bias tables and projections hold garbage too, as after `to_empty`.
        """
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                trunc_normal_(module.weight, std=0.02)
                if getattr(module, 'bias', None) is not None:
                    nn.init.zeros_(module.bias)
            elif needs_reset and hasattr(module, 'reset_parameters'):
                module.reset_parameters()
        for parameter in (self.start_token, self.pos_embed):
            if parameter is not None:
                trunc_normal_(parameter, std=0.02)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay: positions, the start token and the bias tables."""
        tables = {f'{name}.table' for name, m in self.named_modules() if isinstance(m, RelPosBias)}
        return {'pos_embed', 'start_token'} | tables

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that group parameters by depth; a shared bias belongs to the stem."""
        return {
            'stem': r'^embed|start_token|pos_embed|^rel_pos_bias',
            'blocks': [(r'^blocks\.(\d+)', None), (r'^norm', (99999,))],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of storing what is inside them."""
        self.grad_checkpointing = enable

    def set_exportable(self, exportable: bool = True) -> set_exportable:
        """Attention in plain operators, for exports that stand alone; see `nprf_vit.layers.set_exportable`."""
        return set_exportable(self, exportable)

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The last layer, from tokens to the levels of a byte."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the last layer: levels as ever, or 0 to return the normalized tokens."""
        if num_classes not in (0, self.levels):
            raise ValueError(f'this model predicts bytes of {self.levels} levels, not {num_classes} classes')
        self.num_classes = num_classes
        like = {'device': self.start_token.device, 'dtype': self.start_token.dtype}
        self.head = nn.Linear(self.embed_dim, num_classes, **like) if num_classes else nn.Identity()

    def bias_table(self) -> torch.Tensor | None:
        """The table (K, 2N-1) of the bias that all blocks share."""
        return None if self.rel_pos_bias is None else self.rel_pos_bias.table

    def embed_bytes(self, raster: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Bytes (B, n) from position `first` on to their embeddings (B, n, E), without positions."""
        channel = torch.arange(first, first + raster.shape[1], device=raster.device) % self.in_chans
        return self.embed(raster.int() + channel.int() * self.levels)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Integer images (B, C, H, W) to normalized tokens (B, N, E); token t has seen the bytes before t."""
        self._check_images(x)
        raster = to_raster(x)[:, : self.length]  # B, N
        x = torch.cat([self.start_token.expand(raster.shape[0], -1, -1), self.embed_bytes(raster[:, :-1])], dim=1)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        x = self.embed_drop(x)
        bias = None if self.rel_pos_bias is None else self.rel_pos_bias()
        if self.masks_bias:
            future = torch.ones(self.length, self.length, dtype=torch.bool, device=x.device).triu(1)
            assert bias is not None  # shared, and dense
            bias = DenseBias(bias.matrix.masked_fill(future, float('-inf')))
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq([_Biased(block, bias) for block in self.blocks], x)
        else:
            for block in self.blocks:
                x = block(x, bias)
        return self.norm(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Tokens (B, N, E) to logits (B, N, V)."""
        if pre_logits or not self.num_classes:
            return x
        with without_autocast(x):  # bits are differences of logits, which bfloat16 would round to three digits
            return self.head(x.to(self.head.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Integer images (B, C, H, W) to logits (B, N, V); those at t predict byte t from the bytes before it."""
        return self.forward_head(self.forward_features(x))

    def _check_images(self, x: torch.Tensor) -> None:
        shape = (self.in_chans, *self.img_size)
        if x.dim() != 4 or tuple(x.shape[1:]) != shape or x.is_floating_point():
            raise ValueError(
                f'expected integer images (B, {", ".join(map(str, shape))}), got {x.dtype} {tuple(x.shape)}'
            )
        # an index beyond the levels would read the next channel's row; bytes of 256 levels cannot have one
        if (x.dtype != torch.uint8 or self.levels < 256) and has_values(x):
            low, high = (int(v) for v in x.aminmax()) if x.numel() else (0, 0)
            if low < 0 or high >= self.levels:
                raise ValueError(f'bytes lie in {low}..{high}, the model has levels 0..{self.levels - 1}')


def check_arguments(kernel: str, rel_pos: str, pos_embed: str, levels: int, length: int, total: int) -> None:
    """Raise for arguments of `PixelTransformer` that no model has."""
    check_kernel(kernel)
    check_rel_pos(rel_pos)
    if pos_embed not in ('learn', 'none'):
        raise ValueError(f"unknown pos_embed {pos_embed!r}: expected 'learn' or 'none'")
    if levels < 2:
        raise ValueError(f'levels must be at least 2, got {levels}')
    if not 1 <= length <= total:
        raise ValueError(f'length {length} must lie in 1..{total}, the bytes of an image')


class _Biased:
    """A block with the bias it shares, callable with tokens alone."""

    def __init__(self, block: nn.Module, bias: Bias | DenseBias | None) -> None:
        self.block, self.bias = block, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, self.bias)


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        'url': '',
        'num_classes': 256,
        'input_size': (3, 32, 32),
        'fixed_input_size': True,
        'pool_size': None,
        'first_conv': 'embed',
        'classifier': 'head',
        'license': 'apache-2.0',
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {name: _cfg() for name in ('nprf_pixel_imagenet32', 'prf_pixel_imagenet32', 'softmax_pixel_imagenet32')}
)


def _create_pixel(variant: str, pretrained: bool, model_args: dict[str, Any], **kwargs: Any) -> PixelTransformer:
    num_classes = kwargs.pop('num_classes', None)  # timm's name for the width of the head
    if num_classes:
        kwargs.setdefault('levels', num_classes)
    return build_model_with_cfg(
        PixelTransformer, variant, pretrained, kwargs_filter=('num_classes', 'global_pool'), **{**model_args, **kwargs}
    )


@register_model
def nprf_pixel_imagenet32(pretrained: bool = False, **kwargs: Any) -> PixelTransformer:
    """Normalized PRF attention with a shared 1-D relative position bias: 3.68 bits/dim in the paper."""
    return _create_pixel('nprf_pixel_imagenet32', pretrained, {}, **kwargs)


@register_model
def prf_pixel_imagenet32(pretrained: bool = False, **kwargs: Any) -> PixelTransformer:
    """PRF attention and absolute positions: 4.04 bits/dim in the paper."""
    return _create_pixel('prf_pixel_imagenet32', pretrained, {'normalize': False, 'rel_pos': 'none'}, **kwargs)


@register_model
def softmax_pixel_imagenet32(pretrained: bool = False, **kwargs: Any) -> PixelTransformer:
    """Softmax attention with a shared 1-D relative position bias: the project's own baseline."""
    return _create_pixel('softmax_pixel_imagenet32', pretrained, {'kernel': 'softmax', 'normalize': False}, **kwargs)
