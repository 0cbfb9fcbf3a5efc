"""A small model, and batches to train it on."""

import timm
import torch

import nprf_vit  # noqa: F401  registers the models

SMALL = {'img_size': 64, 'embed_dim': 32, 'depth': 2, 'num_heads': 2, 'num_classes': 5, 'feature_dim': 8}


def make(**kwargs):
    """A model in evaluation mode, with a bias that matters."""
    torch.manual_seed(0)
    model = timm.create_model('nprf_deit_tiny', **{**SMALL, **kwargs}).eval()
    with torch.no_grad():
        for module in model.bias_modules().values():
            module.table.normal_()
    return model


def batch(size=4, seed=1):
    """Images (B, 3, 64, 64) and labels (B,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 64, 64, generator=generator), torch.randint(0, 5, (size,), generator=generator)
