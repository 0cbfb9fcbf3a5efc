"""The detection example: masks from torchvision's image sizes, and what a neighbour in the batch does to features."""

import pytest
import torch

pytest.importorskip('sklearn')
from examples.detection_masks import main, make_detector, moved_by_padding, patch_mask, photographs


def test_the_mask_covers_every_patch_that_shows_something():
    mask = patch_mask([(32, 48), (33, 17)], 64, 48)
    assert mask.shape == (2, 4, 3)
    assert mask[0].tolist() == [[True] * 3] * 2 + [[False] * 3] * 2
    assert mask[1].tolist() == [[True, True, False]] * 3 + [[False] * 3]


def test_padding_moves_nothing():
    assert moved_by_padding(make_detector().eval()) < 1e-5


def test_without_the_mask_it_does():
    assert moved_by_padding(make_detector(masked=False).eval()) > 0.05


@torch.no_grad()
def test_the_heads_see_the_same_beside_a_neighbour():
    """Convolutions over the map: beyond the image they find zeros, as beyond the border of a map of its own."""
    detector, images = make_detector().eval(), photographs()
    scores = []
    for batch in (images[:1], images):
        padded, _ = detector.transform(batch)
        scores.append(detector.rpn.head([detector.backbone(padded.tensors)])[0][0][0])
    height, width = scores[0].shape[-2:]
    torch.testing.assert_close(scores[1][:, :height, :width], scores[0], rtol=1e-4, atol=1e-5)
    assert len(detector(images)) == 2


def test_it_runs(capsys):
    main()
    said = capsys.readouterr().out
    assert 'with the mask' in said and 'loss_classifier' in said
