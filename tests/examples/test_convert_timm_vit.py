"""The conversion example: more features are nearer to softmax, and costs are counted."""

import pytest
import timm
import torch

pytest.importorskip('sklearn')
import nprf_vit
from examples.convert_timm_vit import FEATURES, count_macs, main, make_vit


@torch.no_grad()
def test_more_features_are_nearer():
    vit, image = make_vit().eval(), torch.randn(8, 1, 8, 8)
    assert isinstance(vit, timm.models.VisionTransformer) and vit.cls_token is not None
    far, near = ((nprf_vit.convert(vit, feature_dim=m)(image) - vit(image)).norm() for m in (8, 4096))
    assert near < far / 4


def test_costs():
    with torch.device('meta'):
        layer = nprf_vit.KernelAttention(768, 12, normalize=False)
    small, large = count_macs(layer, 32), count_macs(layer, 64)
    assert large == pytest.approx(4 * small)  # linear in the number of tokens


def test_it_runs(capsys):
    found = main(['--epochs', '1', '--tune-epochs', '1', '--images', '64'])
    assert len(found) == 1 + 2 * len(FEATURES) and '2048 px' in capsys.readouterr().out


@pytest.mark.slow
def test_in_full():
    found = main([])
    converted, tuned = ([found[f'{m} {what}'] for m in FEATURES] for what in ('converted', 'tuned'))
    assert found['softmax'] > 85 and converted[0] < converted[-1] and tuned[-1] > found['softmax'] - 10
