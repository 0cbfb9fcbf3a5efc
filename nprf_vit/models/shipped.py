"""Weights that come with the package: what `pretrained=True` loads, and the arguments of the models they belong to.

A tag of timm's carries weights and a data configuration, and no width or depth. These models are smaller than the entry
point they are tags of, so each tag brings arguments of its own; what a caller gives still comes first.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).with_name('weights')


@dataclass(frozen=True)
class Shipped:
    """One file of weights; docs/results has the configuration and the history of its training.

    Attributes:
        model_args: Of the model's constructor, where they are not the entry point's.
        pretrained_cfg: timm's fields.
    """

    model_args: dict[str, Any]
    pretrained_cfg: dict[str, Any]


def _cfg(name: str, pixels: int, mean: float, std: float, label_names: str, description: str) -> dict[str, Any]:
    return {
        'file': str(WEIGHTS / f'{name}.safetensors'),
        'input_size': (1, pixels, pixels),
        'num_classes': 10,
        'crop_pct': 1.0,
        'mean': (mean,),
        'std': (std,),
        'label_names': tuple(label_names.split(', ')),
        'description': description,
    }


_SMALL = {'depth': 4, 'feature_dim': 16, 'mlp_ratio': 2, 'pos_embed': 'learn'}
_CLOTHES = 'T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot'

SHIPPED = {
    'nprf_deit_tiny.digits': Shipped(
        {**_SMALL, 'patch_size': 2, 'embed_dim': 64, 'num_heads': 4},
        _cfg(
            'digits',
            8,
            0.3,
            0.37,
            ', '.join('0123456789'),
            "scikit-learn's digits at 8 px: top-1 98.61 on the 360 that configs/digits.yaml holds out",
        ),
    ),
    'nprf_deit_tiny.fashion_mnist': Shipped(
        {**_SMALL, 'patch_size': 7, 'embed_dim': 128, 'num_heads': 8, 'rel_pos': 'layer'},
        _cfg(
            'fashion_mnist',
            28,
            0.286,
            0.353,
            _CLOTHES,
            'Fashion-MNIST at 28 px: top-1 91.82 on its test images',
        ),
    ),
}
