"""The entry points of the DeiT family: what `timm.create_model` knows by name."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg

from .distilled import KernelVisionTransformerDistilled
from .kernel_deit import KernelVisionTransformer, checkpoint_filter_fn
from .shipped import SHIPPED

__all__ = ['checkpoint_filter_fn']  # register_model adds the entry points


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
        **{name: _cfg(**shipped.pretrained_cfg) for name, shipped in SHIPPED.items()},
        # after its tags and with a star: timm would take the first tag with weights for the default, classes and all
        'nprf_deit_tiny.*': _cfg(),
        'nprf_deit_small': _cfg(),
        'nprf_deit_base': _cfg(),
        'nprf_deit_base_384': _cfg(input_size=(3, 384, 384), crop_pct=1.0),
        'nprf_deit_base_patch8': _cfg(),
        'nprf_deit_base_patch32': _cfg(),
        'nprf_deit_base_distilled': _cfg(classifier=('head', 'head_dist')),
        'nprf_deit_large': _cfg(),
        'nprf_deit_base_norpe': _cfg(),
        'prf_deit_base': _cfg(),
        'softmax_deit_base': _cfg(),
    }
)


def _create_kernel_deit(
    variant: str,
    pretrained: bool,
    model_args: dict[str, Any],
    model_cls: type[KernelVisionTransformer] = KernelVisionTransformer,
    **kwargs: Any,
) -> KernelVisionTransformer:
    out_indices = kwargs.pop('out_indices', 3)
    tag = resolve_pretrained_cfg(variant, kwargs.get('pretrained_cfg')).tag
    shipped = SHIPPED.get(f'{variant}.{tag}')
    tag_args = {} if shipped is None else shipped.model_args
    model = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        feature_cfg={'out_indices': out_indices, 'feature_cls': 'getter'},
        **{**model_args, **tag_args, **kwargs},
    )
    if tag_args:
        model._model_args = dict(tag_args)  # timm writes these into config.json, with those of the caller on top
    return model


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
def nprf_deit_base_384(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """`nprf_deit_base` for 384×384 pixels, a 24×24 grid: to fine-tune from 224 pixels."""
    return _create_kernel_deit('nprf_deit_base_384', pretrained, {'img_size': 384}, **kwargs)


@register_model
def nprf_deit_base_patch8(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """`nprf_deit_base` on patches of 8×8 pixels, a 28×28 grid."""
    return _create_kernel_deit('nprf_deit_base_patch8', pretrained, {'patch_size': 8}, **kwargs)


@register_model
def nprf_deit_base_patch32(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """`nprf_deit_base` on patches of 32×32 pixels, a 7×7 grid."""
    return _create_kernel_deit('nprf_deit_base_patch32', pretrained, {'patch_size': 32}, **kwargs)


@register_model
def nprf_deit_base_distilled(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """`nprf_deit_base` with a class and a distillation token, which have biases of their own, and two heads."""
    distilled = KernelVisionTransformerDistilled
    return _create_kernel_deit('nprf_deit_base_distilled', pretrained, {}, distilled, **kwargs)


@register_model
def nprf_deit_large(pretrained: bool = False, **kwargs: Any) -> KernelVisionTransformer:
    """DeiT-large with normalized PRF attention and a shared 2-D relative position bias."""
    model_args = {'embed_dim': 1024, 'depth': 24, 'num_heads': 16}
    return _create_kernel_deit('nprf_deit_large', pretrained, model_args, **kwargs)


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
