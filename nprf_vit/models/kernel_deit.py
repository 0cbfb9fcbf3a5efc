"""DeiT with kernelized attention and relative position bias; nprf_deit.py has its entry points.

B batch, H×W grid (N = H·W tokens), C channels, K heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import PatchEmbed, register_notrace_function, to_2tuple
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from nprf_vit.layers import ConvPatchEmbed, KernelBlock, RelPosBias, set_exportable
from nprf_vit.layers.attention_checks import check_kernel
from nprf_vit.layers.prefix_bias import make_rel_pos_bias
from nprf_vit.layers.rel_pos import check_extend, check_grid_size, check_rel_pos

from .input_size import record_input_size
from .state_dicts import adapt_state_dict, checkpoint_filter_fn, resize_pos_embed
from .token_mask import hide_pixels, pool_tokens, token_mask

# timm's tools look for the filter in the module of the model's class
__all__ = ['KernelVisionTransformer', 'checkpoint_filter_fn']

STEMS: dict[str, Callable[..., nn.Module] | None] = {'patch': None, 'conv': ConvPatchEmbed}  # None: `embed_layer`

# torch.fx looks for what to keep whole among the names of the module that calls it
for _name in ('token_mask', 'hide_pixels', 'pool_tokens'):
    torch.fx.wrap(_name)


@torch.fx.wrap
@register_notrace_function
def check_image(x: torch.Tensor, embed: PatchEmbed, dynamic: bool) -> torch.Tensor:
    """Return x if the model takes images of its size, or say what would have been right."""
    height, width = x.shape[-2:]
    p = embed.patch_size
    if not embed.dynamic_img_pad and (height % p[0] or width % p[1]):
        raise ValueError(f'image {height}x{width} is not divisible by the patch size {p[0]}x{p[1]}')
    if not dynamic and (height, width) != tuple(embed.img_size):
        raise ValueError(
            f'image {height}x{width} does not match img_size {embed.img_size[0]}x{embed.img_size[1]}: '
            'call set_input_size, or create the model with dynamic_img_size=True'
        )
    return x


def check_divisible(img_size: int | tuple[int, int], patch_size: int | tuple[int, int]) -> None:
    """Raise where timm would cut the image's border off."""
    (height, width), p = to_2tuple(img_size), to_2tuple(patch_size)
    if height % p[0] or width % p[1]:
        raise ValueError(f'img_size {height}x{width} is not divisible by the patch size {p[0]}x{p[1]}')


@torch.fx.wrap
@register_notrace_function
def check_not_causal(is_causal: bool) -> None:
    """Raise for what timm's signature has and a grid of tokens has not."""
    if is_causal:
        raise ValueError('this model takes no is_causal: its tokens are a grid without order')


class KernelVisionTransformer(VisionTransformer):
    """timm's VisionTransformer with kernelized attention on a grid of tokens.

    Tokens stay (B, H, W, C) through the blocks, so that attention reads the grid from the shape; with class or register
    tokens they are (B, P+N, C). `forward_features` returns (B, N, C) or (B, P+N, C), as timm's ViT does.

    Args:
        img_size: Input size; fixes the grid the bias is learned on.
        patch_size: Patch size.
        kernel: Attention kernel, see `nprf_vit.layers.KernelAttention`.
        normalize: Give queries and keys length one.
        rel_pos: Relative position bias 'shared' by all blocks, one per 'layer', or 'none'.
        rel_pos_extend: How the bias serves grids larger than it was learned on: 'interpolate' its table, 'extend' it by
            a constant per head, or take it as the bias between 'cells', both O(N), or 'clip' offsets to its own; see
            `nprf_vit.layers.RelPosBias`.
        rel_pos_size: Grid the bias is learned on; that of img_size unless given. With 'cells' the number of cells and
            with 'extend' the size of the window: unless given, those of the table that is loaded; one of another size
            is resized to it, or cropped.
        feature_dim: Number of random features per head.
        attn_backend: Algorithm of `nprf_vit.ops.kernel_attention`.
        seed: Seed of the random projections; block i draws from (seed, i).
        global_pool: Pooling of the tokens before the head.
        class_token: Prepend a class token. Beside a relative bias it has learned ones of its own, as register tokens
            (`reg_tokens`) have; see `nprf_vit.layers.PrefixRelPosBias`.
        pos_embed: Absolute position embedding, 'learn' or 'none'; by default learned where there is no bias.
        fc_norm: Norm after the pooling instead of before.
        stem: 'patch', one convolution as large as a patch, or 'conv', small ones whose patches overlap; see
            `nprf_vit.layers.ConvPatchEmbed`.
        **kwargs: The other arguments of timm's VisionTransformer.
    """

    distilled = False  # whether a distillation token follows the class token

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        kernel: str = 'prf',
        normalize: bool = True,
        rel_pos: str = 'shared',
        rel_pos_extend: str = 'interpolate',
        rel_pos_size: int | tuple[int, int] | None = None,
        feature_dim: int = 32,
        attn_backend: str = 'auto',
        seed: int = 0,
        global_pool: str = 'avg',
        class_token: bool = False,
        pos_embed: str | None = None,
        fc_norm: bool = False,
        stem: str = 'patch',
        embed_layer: Callable[..., nn.Module] = PatchEmbed,
        weight_init: str = '',
        **kwargs: Any,
    ) -> None:
        check_kernel(kernel, feature_dim)
        num_prefix_tokens = self.distilled + class_token + kwargs.get('reg_tokens', 0)
        patch_drop_rate = kwargs.get('patch_drop_rate', 0)
        check_rel_pos(rel_pos)
        if rel_pos != 'none' and patch_drop_rate:
            raise ValueError(
                f'rel_pos={rel_pos!r} needs the whole grid: expected patch_drop_rate=0 with it, or '
                f"rel_pos='none', got patch_drop_rate={patch_drop_rate}"
            )
        check_extend(rel_pos_extend)
        if stem not in STEMS:
            raise ValueError(f'stem={stem!r}: expected one of {tuple(STEMS)}')
        if STEMS[stem] is not None and embed_layer is not PatchEmbed:
            raise ValueError(f"stem={stem!r} is an embed_layer itself: expected stem='patch' beside another one")
        check_divisible(img_size, patch_size)
        fixed_size = rel_pos_extend in ('cells', 'extend') and rel_pos_size is not None
        if rel_pos_size is None:
            grid_size = tuple(s // p for s, p in zip(to_2tuple(img_size), to_2tuple(patch_size)))
        else:
            grid_size = to_2tuple(rel_pos_size)
        check_grid_size(grid_size, 'rel_pos_size')
        pos_embed = pos_embed or ('learn' if rel_pos == 'none' else 'none')
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            global_pool=global_pool,
            class_token=class_token,
            pos_embed=pos_embed,
            fc_norm=fc_norm,
            embed_layer=partial(STEMS[stem] or embed_layer, output_fmt='NHWC'),
            block_fn=partial(
                KernelBlock,
                rel_pos_size=grid_size if rel_pos == 'layer' else None,
                rel_pos_extend=rel_pos_extend,
                num_prefix_tokens=num_prefix_tokens,
                attn_backend=attn_backend,
                kernel=kernel,
                normalize=normalize,
                feature_dim=feature_dim,
                seed=seed,
            ),
            weight_init='skip',
            **kwargs,
        )
        self.kernel = kernel
        self.rel_pos = rel_pos
        self.on_grid = not (num_prefix_tokens or patch_drop_rate)
        if pos_embed == 'none':
            self.pos_embed: nn.Parameter | None = None  # timm's distilled model makes one all the same
        self.rel_pos_bias = None
        if rel_pos == 'shared':
            dd: dict[str, Any] = {k: kwargs.get(k) for k in ('device', 'dtype')}
            table = grid_size, self.blocks[0].attn.num_heads, kernel == 'softmax', rel_pos_extend
            self.rel_pos_bias = make_rel_pos_bias(*table, num_prefix_tokens, **dd)
        for bias in self.bias_modules().values():
            bias.fixed_size = fixed_size

        self.weight_init_mode = 'reset' if weight_init == 'skip' else weight_init
        if weight_init != 'skip':
            self.init_weights(needs_reset=False)

    def bias_modules(self) -> dict[str, RelPosBias]:
        """The relative position biases by name: one when shared, one per block, or none."""
        return {name: m for name, m in self.named_modules() if isinstance(m, RelPosBias)}

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay: timm's and the biases."""
        ours = {f'{name}.{p}' for name, module in self.bias_modules().items() for p, _ in module.named_parameters()}
        return super().no_weight_decay() | ours

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that group parameters by depth; a shared bias belongs to the stem."""
        matcher = super().group_matcher(coarse)
        return dict(matcher, stem=matcher['stem'] + r'|rel_pos_bias')

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Change the input resolution or patch size; an absolute embedding and interpolated biases are resized.

        Args:
            img_size: New input size, unchanged if None.
            patch_size: New patch size, unchanged if None.
        """
        embed = self.patch_embed
        img_size = to_2tuple(img_size or embed.img_size)
        check_divisible(img_size, patch_size or embed.patch_size)
        old_grid = embed.grid_size
        embed.set_input_size(img_size=img_size, patch_size=patch_size)
        if self.pos_embed is not None and embed.grid_size != old_grid:
            prefix = 0 if self.no_embed_class else self.num_prefix_tokens
            pos_embed = resize_pos_embed(self.pos_embed.detach(), embed.grid_size, old_grid, prefix)
            self.pos_embed = nn.Parameter(pos_embed, requires_grad=self.pos_embed.requires_grad)
        for module in self.bias_modules().values():
            module.set_grid_size(embed.grid_size)
        record_input_size(self, patch_size)

    def set_exportable(self, exportable: bool = True) -> set_exportable:
        """Attention in plain operators, for exports that stand alone; see `nprf_vit.layers.set_exportable`."""
        return set_exportable(self, exportable)

    def _pos_embed(self, x: torch.Tensor) -> torch.Tensor:
        """Add the absolute embedding and prefix tokens: (B, H, W, C) to the same, or to (B, P+N, C) off the grid."""
        x = x.contiguous()  # the convolution leaves channels outermost, and every residual would inherit those strides
        pos_embed = self.pos_embed
        if self.dynamic_img_size and pos_embed is not None:
            prefix = 0 if self.no_embed_class else self.num_prefix_tokens
            grid_size = (x.shape[1], x.shape[2])
            pos_embed = resize_pos_embed(pos_embed, grid_size, self.patch_embed.grid_size, prefix)
        if self.on_grid:
            if pos_embed is not None:
                x = x + pos_embed.reshape(1, x.shape[1], x.shape[2], -1)
            return self.pos_drop(x)
        x = x.flatten(1, 2)  # B, N, C
        if pos_embed is not None and self.no_embed_class:
            x = x + pos_embed
        tokens = [t.expand(x.shape[0], -1, -1) for t in self._prefix_tokens() if t is not None]
        x = torch.cat([*tokens, x], dim=1)  # B, P+N, C
        if pos_embed is not None and not self.no_embed_class:
            x = x + pos_embed
        return self.pos_drop(x)

    def _prefix_tokens(self) -> tuple[torch.Tensor | None, ...]:
        """Tokens (1, ·, C) before those of the grid, in their order."""
        return self.cls_token, self.reg_token

    def _embed(self, x: torch.Tensor, attn_mask: torch.Tensor | None) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """Image (B, in_chans, height, width) to the tokens that the blocks take, and what else all of them take."""
        x = check_image(x, self.patch_embed, self.dynamic_img_size)
        drops = self.training and not isinstance(self.patch_drop, nn.Identity)
        mask = token_mask(attn_mask, x, self.patch_embed, self.num_prefix_tokens, drops)
        x = self.patch_embed(hide_pixels(x, mask, self.patch_embed, self.num_prefix_tokens))  # B, H, W, C
        grid_size = (x.shape[1], x.shape[2])
        bias = None if self.rel_pos_bias is None else self.rel_pos_bias(grid_size)
        x = self.norm_pre(self.patch_drop(self._pos_embed(x)))
        # a bias of the block's own is not told the grid by the shape of (B, P+N, C)
        needs_grid = self.rel_pos == 'layer' and not self.on_grid
        return x, ((bias, mask, grid_size) if needs_grid else (bias, mask))

    def _run_block(self, block: nn.Module, x: torch.Tensor, shared: tuple[Any, ...]) -> torch.Tensor:
        return checkpoint(block, x, *shared) if self.grad_checkpointing else block(x, *shared)

    def _to_nlc(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1, 2) if self.on_grid else x  # B, N, C

    def forward_features(
        self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        """Image to normalized tokens (B, N, C).

        Args:
            x: (B, in_chans, height, width).
            attn_mask: (B, H, W) or (B, N) of bool, or (B, 1, 1, N): False for patches that are padding or left out.
                No token attends to them, their pixels do not count, and their own outputs are finite.
            is_causal: Must be False; in timm's signature.
        """
        check_not_causal(is_causal)
        x, shared = self._embed(x, attn_mask)
        for block in self.blocks:
            x = self._run_block(block, x, shared)
        return self.norm(self._to_nlc(x))

    def forward_head(
        self, x: torch.Tensor, pre_logits: bool = False, attn_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Tokens (B, N, C) to logits; with a mask (B, N) or (B, H, W), pooled over the tokens that count."""
        prefix, include_prefix = self.num_prefix_tokens, self.pool_include_prefix
        x = pool_tokens(x, attn_mask, self.global_pool, prefix, include_prefix, self.attn_pool)
        x = self.head_drop(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Image (B, in_chans, height, width) to logits (B, num_classes); `attn_mask` as in `forward_features`."""
        x = self.forward_features(x, attn_mask, is_causal)
        return self.forward_head(x, attn_mask=attn_mask)

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> list[Any] | tuple[torch.Tensor, list[Any]] | dict[str, Any]:
        """Forward that returns the output of chosen blocks; arguments and results as in timm's VisionTransformer.

        `attn_mask` as in `forward_features`.
        """
        if output_fmt not in ('NCHW', 'NLC'):
            raise ValueError(f"output_fmt {output_fmt!r}: expected 'NCHW' or 'NLC'")
        check_not_causal(is_causal)
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        grid_size = self.patch_embed.dynamic_feat_size(x.shape[-2:])
        x, shared = self._embed(x, attn_mask)
        blocks = self.blocks[: max_index + 1] if stop_early else self.blocks
        taken: list[Any] = []  # tensors, or at the end pairs with their prefix tokens
        for i, block in enumerate(blocks):
            x = self._run_block(block, x, shared)
            if i in take_indices:
                taken.append(self._to_nlc(self.norm(x) if norm else x))
        prefix = [y[:, : self.num_prefix_tokens] for y in taken] if self.num_prefix_tokens else None
        taken = [y[:, self.num_prefix_tokens :] for y in taken]
        if output_fmt == 'NCHW':
            taken = [y.transpose(1, 2).unflatten(2, grid_size).contiguous() for y in taken]  # B, C, H, W

        if output_dict:
            out: dict[str, Any] = {'image_intermediates': taken}
            if prefix is not None and return_prefix_tokens:
                out['image_intermediates_prefix'] = prefix
            if not intermediates_only:
                out['image_features'] = self.norm(self._to_nlc(x))
            return out
        if prefix is not None and return_prefix_tokens:
            taken = list(zip(taken, prefix))
        return taken if intermediates_only else (self.norm(self._to_nlc(x)), taken)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # here and not in a filter function, because create_model(checkpoint_path=...) calls none
        adapt_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
