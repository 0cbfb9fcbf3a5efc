"""What a configuration may hand to a model's constructor: plain values of sane sizes, nothing that loads files."""

from typing import Any

from nprf_vit.errors import InputError

_LIMITS = {'depth': 1000, 'embed_dim': 65536, 'num_heads': 1024, 'patch_size': 4096, 'feature_dim': 65536}
_LIMITS |= {'mlp_ratio': 256, 'levels': 65536, 'seed': 2**63 - 1}
_OTHERS = 10_000_000  # arguments that this file does not know
# timm.create_model would read weights or settings from where these point to
_LOADING = ('checkpoint_path', 'pretrained', 'pretrained_cfg', 'pretrained_cfg_overlay', 'cache_dir')
# of this package's models: what people write as keys of their own
MODEL_ARGUMENTS: tuple[str, ...] = (
    'embed_dim',
    'depth',
    'num_heads',
    'mlp_ratio',
    'patch_size',
    'pos_embed',
    'class_token',
    'global_pool',
)
MODEL_ARGUMENTS += ('kernel', 'normalize', 'feature_dim', 'attn_backend', 'rel_pos', 'rel_pos_extend', 'rel_pos_size')
MODEL_ARGUMENTS += ('dynamic_img_size', 'levels', 'length')
_KEYS = {'img_size': 'img_size', 'in_chans': 'in_chans', 'num_classes': 'num_classes'}
_KEYS |= {'drop_rate': 'drop', 'drop_path_rate': 'drop_path'}


def check_model_kwargs(given: dict[str, Any]) -> None:
    """Raise for arguments that load files, that have keys of their own, or that would not fit into any memory."""
    for name, value in given.items():
        if name in _LOADING:
            raise InputError(f'model_kwargs.{name} is not read: weights come by initial_checkpoint or pretrained')
        if name in _KEYS:
            raise InputError(f'model_kwargs.{name} has a key of its own: {_KEYS[name]}')
        _check_value(f'model_kwargs.{name}', value, _LIMITS.get(name, _OTHERS))


def _check_value(name: str, value: Any, limit: int) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_value(name, item, limit)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_value(f'{name}.{key}', item, limit)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not abs(value) <= limit:
            raise InputError(f'{name} {value} is above the largest allowed value {limit}')
    elif not isinstance(value, (str, bool, type(None))):
        raise InputError(f'{name} is {type(value).__name__}: expected a number, text, true or false')
