"""DeiT with kernelized attention and relative position bias, as a timm model family.

B batch, H×W grid (N = H·W tokens), C channels, K heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import PatchEmbed, register_notrace_function, to_2tuple
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from nprf_vit.layers import KernelBlock, RelPosBias
from nprf_vit.layers.attention import check_kernel
from nprf_vit.layers.rel_pos import check_extend, check_grid_size, check_rel_pos
from nprf_vit.ops.bias import Bias, DenseBias

from .state_dicts import adapt_state_dict, resize_pos_embed

__all__ = ['KernelVisionTransformer']  # register_model adds the entry points


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


class KernelVisionTransformer(VisionTransformer):
    """timm's VisionTransformer with kernelized attention on a grid of tokens.

    Tokens stay (B, H, W, C) through the blocks, so that attention reads the grid from the shape. `forward_features`
    returns (B, N, C), as timm's ViT does.

    Args:
        img_size: Input size; fixes the grid the bias is learned on.
        patch_size: Patch size.
        kernel: Attention kernel, see `nprf_vit.layers.KernelAttention`.
        normalize: Give queries and keys length one.
        rel_pos: Relative position bias 'shared' by all blocks, one per 'layer', or 'none'.
        rel_pos_extend: How the bias serves grids larger than it was learned on: 'interpolate' its table, 'extend' it by
            a constant per head, or take it as the bias between 'cells', both O(N); see `nprf_vit.layers.RelPosBias`.
        rel_pos_size: Grid the bias is learned on; that of img_size unless given. With 'cells', the number of cells:
            unless given, that of the table that is loaded.
        feature_dim: Number of random features per head.
        attn_backend: Algorithm of `nprf_vit.ops.kernel_attention`.
        seed: Seed of the random projections; block i draws from (seed, i).
        global_pool: Pooling of the tokens before the head.
        class_token: Prepend a class token; needs rel_pos='none'.
        pos_embed: Absolute position embedding, 'learn' or 'none'; by default learned where there is no bias.
        fc_norm: Norm after the pooling instead of before.
        **kwargs: The other arguments of timm's VisionTransformer.
    """

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
        embed_layer: Callable[..., nn.Module] = PatchEmbed,
        weight_init: str = '',
        **kwargs: Any,
    ) -> None:
        check_kernel(kernel, feature_dim)
        prefix_or_drop = class_token or kwargs.get('reg_tokens', 0) or kwargs.get('patch_drop_rate', 0)
        check_rel_pos(rel_pos)
        if rel_pos != 'none' and prefix_or_drop:
            raise ValueError(
                f'rel_pos={rel_pos!r} needs every token on the grid: use no class token, register token or patch '
                "dropout with it, or pass rel_pos='none'"
            )
        check_extend(rel_pos_extend)
        check_divisible(img_size, patch_size)
        fixed_size = rel_pos_extend == 'cells' and rel_pos_size is not None
        if rel_pos_size is None:
            grid_size = tuple(s // p for s, p in zip(to_2tuple(img_size), to_2tuple(patch_size)))
        else:
            grid_size = to_2tuple(rel_pos_size)
        check_grid_size(grid_size, 'rel_pos_size')
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            global_pool=global_pool,
            class_token=class_token,
            pos_embed=pos_embed or ('learn' if rel_pos == 'none' else 'none'),
            fc_norm=fc_norm,
            embed_layer=partial(embed_layer, output_fmt='NHWC'),
            block_fn=partial(
                KernelBlock,
                rel_pos_size=grid_size if rel_pos == 'layer' else None,
                rel_pos_extend=rel_pos_extend,
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
        self.on_grid = not prefix_or_drop
        self.rel_pos_bias = None
        if rel_pos == 'shared':
            dd = {k: kwargs.get(k) for k in ('device', 'dtype')}
            num_heads = self.blocks[0].attn.num_heads
            self.rel_pos_bias = RelPosBias(grid_size, num_heads, kernel == 'softmax', rel_pos_extend, **dd)
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
            self.pos_embed: nn.Parameter | None = nn.Parameter(pos_embed, requires_grad=self.pos_embed.requires_grad)
        for module in self.bias_modules().values():
            module.set_grid_size(embed.grid_size)

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
        tokens = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        x = torch.cat([*tokens, x], dim=1)  # B, P+N, C
        if pos_embed is not None and not self.no_embed_class:
            x = x + pos_embed
        return self.pos_drop(x)

    def _embed(self, x: torch.Tensor) -> tuple[torch.Tensor, Bias | DenseBias | None]:
        """Image (B, in_chans, height, width) to the tokens the blocks take and the bias they share."""
        x = check_image(x, self.patch_embed, self.dynamic_img_size)
        x = self.patch_embed(x)  # B, H, W, C
        bias = None if self.rel_pos_bias is None else self.rel_pos_bias((x.shape[1], x.shape[2]))
        x = self.norm_pre(self.patch_drop(self._pos_embed(x)))
        return x, bias

    def _run_block(self, block: nn.Module, x: torch.Tensor, bias: Bias | DenseBias | None) -> torch.Tensor:
        return checkpoint(block, x, bias) if self.grad_checkpointing else block(x, bias)

    def _to_nlc(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1, 2) if self.on_grid else x  # B, N, C

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Image to normalized tokens (B, N, C)."""
        x, bias = self._embed(x)
        for block in self.blocks:
            x = self._run_block(block, x, bias)
        return self.norm(self._to_nlc(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Image (B, in_chans, height, width) to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

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
        """Forward that returns the output of chosen blocks; arguments and results as in timm's VisionTransformer."""
        if output_fmt not in ('NCHW', 'NLC'):
            raise ValueError(f"output_fmt {output_fmt!r}: expected 'NCHW' or 'NLC'")
        if attn_mask is not None or is_causal:
            raise ValueError('this model takes no attn_mask and no is_causal: its tokens are a grid without order')
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        grid_size = self.patch_embed.dynamic_feat_size(x.shape[-2:])
        x, bias = self._embed(x)
        blocks = self.blocks[: max_index + 1] if stop_early else self.blocks
        taken: list[Any] = []  # tensors, or at the end pairs with their prefix tokens
        for i, block in enumerate(blocks):
            x = self._run_block(block, x, bias)
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


def _cfg(url: str = '', **kwargs: Any) -> dict[str, Any]:
    return {
        'url': url,
        'num_classes': 1000,
        'input_size': (3, 224, 224),
        'pool_size': None,
        'crop_pct': 0.9,
        'interpolation': 'bicubic',
        'fixed_input_size': True,
        'mean': IMAGENET_DEFAULT_MEAN,
        'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'patch_embed.proj',
        'classifier': 'head',
        'license': 'apache-2.0',
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        name: _cfg()
        for name in (
            'nprf_deit_tiny',
            'nprf_deit_small',
            'nprf_deit_base',
            'nprf_deit_base_norpe',
            'prf_deit_base',
            'softmax_deit_base',
        )
    }
)


def _create_kernel_deit(
    variant: str, pretrained: bool, model_args: dict[str, Any], **kwargs: Any
) -> KernelVisionTransformer:
    out_indices = kwargs.pop('out_indices', 3)
    return build_model_with_cfg(
        KernelVisionTransformer,
        variant,
        pretrained,
        feature_cfg={'out_indices': out_indices, 'feature_cls': 'getter'},
        **dict(model_args, **kwargs),
    )


@register_model
def nprf_deit_tiny(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """DeiT-tiny with normalized PRF attention and a shared 2-D relative position bias."""
    return _create_kernel_deit('nprf_deit_tiny', pretrained, {'embed_dim': 192, 'num_heads': 3}, **kwargs)


@register_model
def nprf_deit_small(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """DeiT-small with normalized PRF attention and a shared 2-D relative position bias."""
    return _create_kernel_deit('nprf_deit_small', pretrained, {'embed_dim': 384, 'num_heads': 6}, **kwargs)


@register_model
def nprf_deit_base(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """DeiT-base with normalized PRF attention and a shared 2-D relative position bias: 80.9 / 94.8 in the paper."""
    return _create_kernel_deit('nprf_deit_base', pretrained, {}, **kwargs)


@register_model
def nprf_deit_base_norpe(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """DeiT-base with normalized PRF attention and absolute positions: 77.7 / 93.3 in the paper."""
    return _create_kernel_deit('nprf_deit_base_norpe', pretrained, {'rel_pos': 'none'}, **kwargs)


@register_model
def prf_deit_base(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """DeiT-base with PRF attention and absolute positions: 79.5 / 94.1 in the paper, fine-tuned from DeiT."""
    return _create_kernel_deit('prf_deit_base', pretrained, {'normalize': False, 'rel_pos': 'none'}, **kwargs)


@register_model
def softmax_deit_base(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """DeiT-base with softmax attention, pooled instead of a class token: 81.2 / 95.0 in the paper."""
    model_args = {'kernel': 'softmax', 'normalize': False, 'rel_pos': 'none'}
    return _create_kernel_deit('softmax_deit_base', pretrained, model_args, **kwargs)
