"""The checkpoint that the reader has trained."""

import timm
import torch

import nprf_vit  # noqa: F401  registers the models

torch.save(timm.create_model('nprf_deit_base').state_dict(), 'trained_at_224.pt')
