"""The segmentation example: a label for each pasted pixel, scores that a wrong map lowers, and a run in small."""

import gzip
import struct

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip('sklearn')
from examples.segmentation import CLASSES, DEBIAN, Segmenter, evaluate, main, make_scenes
from nprf_vit.data.datasets.digits import Digits


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """The four IDX files, filled with scans of digits at the size of Fashion-MNIST's clothes."""
    folder = tmp_path_factory.mktemp('idx')
    for part, split in (('train', 'train'), ('t10k', 'validation')):
        digits = Digits(split)
        images = np.pad(np.kron(digits.levels, np.ones((3, 3), np.uint8)) * 15, ((0, 0), (2, 2), (2, 2)))
        for name, array in (('images-idx3', images), ('labels-idx1', digits.targets)):
            header = struct.pack('>HBB', 0, 8, array.ndim) + struct.pack(f'>{array.ndim}I', *array.shape)
            with gzip.open(folder / f'{part}-{name}-ubyte.gz', 'wb') as stream:
                stream.write(header + array.astype(np.uint8).tobytes())
    return folder


def test_labels_lie_where_clothes_lie():
    clothes, labels = np.zeros((1, 28, 28), np.uint8), np.array([3])
    clothes[0, 10:20, 5:25] = 255
    images, targets = make_scenes(clothes, labels, 4, 56, seed=0)
    assert images.shape == (4, 1, 56, 56) and targets.shape == (4, 56, 56)
    brightest = (images == images.max())[:, 0]
    assert torch.equal(targets == 4, brightest) and set(targets.unique().tolist()) == {0, 4}
    assert 200 <= brightest.sum() / 4 <= 400  # two pieces of 200 pixels, which may overlap
    more = make_scenes(clothes, labels, 4, 112, seed=0)[1]
    assert (more == 4).sum() > 2 * (targets == 4).sum()


class Oracle(nn.Module):
    """Reads the class of each pixel from the image; `wrong` classes are taken for the background."""

    def __init__(self, wrong=()):
        super().__init__()
        self.wrong = wrong

    def forward(self, x):
        found = x[:, 0].long()
        for label in self.wrong:
            found = found.masked_fill(found == label, 0)
        return nn.functional.one_hot(found, CLASSES).permute(0, 3, 1, 2).float()


def test_scores():
    targets = torch.arange(CLASSES).repeat(3, 4, 1)  # each class as often
    images = targets[:, None].float()
    assert evaluate(Oracle(), images, targets) == pytest.approx((100, 100))
    pixels, iou = evaluate(Oracle(wrong=(2,)), images, targets)
    assert pixels == pytest.approx(100 * 10 / 11)
    assert iou == pytest.approx(100 * (9 + 1 / 2) / 11)  # none of class 2, and half of what is called background


@torch.no_grad()
def test_maps_of_any_canvas():
    model = Segmenter().eval()
    assert model(torch.randn(1, 1, 56, 84)).shape == (1, CLASSES, 56, 84)
    assert all(block.attn.rel_pos_bias.extend == 'extend' for block in model.encoder.model.blocks)


def test_it_runs(folder, tmp_path, capsys):
    options = ['--data-dir', folder, '--images', 64, '--epochs', 1, '--test-images', 4, '--picture', tmp_path / 'x.png']
    found = main([str(option) for option in options])
    assert set(found) == {56, 112} and (tmp_path / 'x.png').stat().st_size > 1000
    assert '112 px: pixels' in capsys.readouterr().out


def test_a_folder_without_the_files_is_told(tmp_path):
    with pytest.raises(SystemExit, match='^error: no train-images-idx3-ubyte.gz in'):
        main(['--data-dir', str(tmp_path)])


@pytest.mark.slow
@pytest.mark.skipif(not DEBIAN.is_dir(), reason='needs the Debian package dataset-fashion-mnist')
def test_in_full():
    found = main([])
    assert found[56] > 32 and found[112] > 27  # 36.4 and 31.8 in docs/examples.md
