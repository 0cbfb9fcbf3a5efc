import timm
import torch

import nprf_vit  # noqa: F401  registers the models

SMALL = {'embed_dim': 32, 'depth': 3, 'num_heads': 2, 'img_size': 64, 'num_classes': 5, 'feature_dim': 8}


def make(name='nprf_deit_base', **kwargs):
    """A model of the family small enough for a test, with biases and embeddings that matter."""
    model = timm.create_model(name, **{**SMALL, **kwargs}).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith('table') or key == 'pos_embed':
                parameter.normal_()
    return model
