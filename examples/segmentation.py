"""A segmentation encoder: a label per pixel for clothes on a photograph, then on a canvas four times as large.

python examples/segmentation.py                    Fashion-MNIST as Debian's dataset-fashion-mnist installs it
python examples/segmentation.py --data-dir DIR     or its four IDX files in DIR, with or without .gz
python examples/segmentation.py --scratch          an encoder that has learned nothing before

Fashion-MNIST's clothes are pasted on grey pieces of scikit-learn's two photographs (CC BY 2.0): 56 px, two pieces of
clothing, ten classes and the background. The encoder is the classifier that comes with the package, by timm's
`features_only=True`; the decoder is two layers. That classifier has seen single pieces of clothing of 28 px, 4×4
patches. A larger canvas shows more at the same scale, so its bias is extended by a constant (`rel_pos_extend='extend'`)
and its position embedding is left out: nothing is tied to a place on the canvas, and 112 px need no training.

It prints:

    KernelVisionTransformer adapted the checkpoint: dropped pos_embed; added blocks.*.attn.rel_pos_bias.far (zero).
    epoch 1/5: loss 1.393
    epoch 2/5: loss 0.579
    epoch 3/5: loss 0.465
    epoch 4/5: loss 0.390
    epoch 5/5: loss 0.342
    56 px: pixels 86.7 %, mean IoU 36.4 %
    112 px: pixels 85.5 %, mean IoU 31.8 %

and with --scratch:

    …
    56 px: pixels 82.0 %, mean IoU 18.3 %
    112 px: pixels 81.3 %, mean IoU 16.1 %
"""

# B batch, C channels, H×W pixels
import argparse
import gzip
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import nn

import nprf_vit  # noqa: F401  registers the models

DEBIAN = Path('/usr/share/datasets/fashion-mnist')
CLASSES, ITEM, PATCH, SIDE = 11, 28, 7, 56  # class 0 is the background; the rest in pixels


def read_idx(folder: Path, name: str) -> np.ndarray:
    """One of the four files of MNIST's format."""
    for path in (folder / f'{name}-ubyte.gz', folder / f'{name}-ubyte'):
        if path.is_file():
            data = gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()
            shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], 'big') for i in range(data[3])]
            return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)
    raise SystemExit(f'error: no {name}-ubyte.gz in {folder}: install dataset-fashion-mnist, or give --data-dir DIR')


def backgrounds() -> list[np.ndarray]:
    """Two photographs in grey, darkened so that clothes stand out; (427, 640) each."""
    return [image.mean(-1) * 0.4 for image in load_sample_images().images]


def make_scenes(clothes: np.ndarray, labels: np.ndarray, count: int, side: int, seed: int) -> tuple:
    """Clothes pasted at random, later ones over earlier ones: images (count, 1, side, side) and labels per pixel."""
    rng, photographs = np.random.default_rng(seed), backgrounds()
    images = np.empty((count, 1, side, side), np.float32)
    targets = np.zeros((count, side, side), np.int64)
    for image, target in zip(images[:, 0], targets):
        photograph = photographs[rng.integers(2)]
        top, left = (rng.integers(s - side + 1) for s in photograph.shape)
        image[:] = photograph[top : top + side, left : left + side]
        for _ in range(2 * (side // SIDE) ** 2):
            which, (y, x) = rng.integers(len(clothes)), rng.integers(side - ITEM + 1, size=2)
            piece = clothes[which]
            image[y : y + ITEM, x : x + ITEM][piece > 0] = piece[piece > 0]
            target[y : y + ITEM, x : x + ITEM][piece > 0] = labels[which] + 1
    return torch.from_numpy(images / 255 - 0.286) / 0.353, torch.from_numpy(targets)


class Segmenter(nn.Module):
    """Maps of two depths, side by side, mixed and spread over the pixels of their patches."""

    def __init__(self, pretrained: bool = True) -> None:
        super().__init__()
        self.encoder = timm.create_model(
            'nprf_deit_tiny.fashion_mnist',
            pretrained=pretrained,
            features_only=True,
            out_indices=(1, 3),
            dynamic_img_size=True,
            rel_pos_extend='extend',
            pos_embed='none',
        )
        channels = sum(self.encoder.feature_info.channels())
        mix = nn.Conv2d(channels, 128, 1), nn.GELU(), nn.Conv2d(128, CLASSES * PATCH**2, 1)
        self.decoder = nn.Sequential(*mix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.encoder(x)  # two of B, C, H/7, W/7
        return F.pixel_shuffle(self.decoder(torch.cat(maps, 1)), PATCH)  # B, classes, H, W


def train(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    steps = epochs * (len(images) // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for epoch in range(epochs):
        losses = []
        for batch in torch.randperm(len(images)).split(32)[: len(images) // 32]:
            loss = F.cross_entropy(model(images[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f'epoch {epoch + 1}/{epochs}: loss {sum(losses) / len(losses):.3f}', flush=True)


@torch.no_grad()
def evaluate(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """Pixels with the right label, and the mean over classes of intersection over union; both in percent."""
    model.eval()
    confusion = torch.zeros(CLASSES, CLASSES)  # right label by found label
    for x, y in zip(images.split(32), targets.split(32)):
        pairs = y.flatten() * CLASSES + model(x).argmax(1).flatten()
        confusion += pairs.bincount(minlength=CLASSES**2).view(CLASSES, CLASSES)
    right = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - right
    return 100 * (right.sum() / confusion.sum()).item(), 100 * (right / union.clamp(min=1)).mean().item()


def draw(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, path: str) -> None:
    """Six scenes, their labels, and what was found."""
    from matplotlib.figure import Figure

    with torch.no_grad():
        found = model(images[:6]).argmax(1)
    figure = Figure(figsize=(9, 4.5), layout='constrained')
    rows = zip(figure.subplots(3, 6), (images[:6, 0], targets[:6], found), ('image', 'label', 'found'))
    for axes, pictures, title in rows:
        for axis, picture in zip(axes, pictures):
            labels = {} if title == 'image' else {'cmap': 'tab20', 'vmin': 0, 'vmax': 19}
            axis.imshow(picture.numpy(), **(labels or {'cmap': 'gray'}))
            axis.set(xticks=[], yticks=[])
        axes[0].set_ylabel(title)
    figure.savefig(path, dpi=80)


def main(argv: list[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, default=DEBIAN, metavar='DIR')
    parser.add_argument('--images', type=int, default=2000, help='scenes to learn from; at least 32')
    parser.add_argument('--epochs', type=int, default=5)
    parser.add_argument('--test-images', type=int, default=300)
    parser.add_argument('--scratch', action='store_true', help='do not start from trained weights')
    parser.add_argument('--picture', metavar='FILE', help='draw six scenes of 112 px; needs matplotlib')
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    parts = {
        name: (read_idx(args.data_dir, f'{name}-images-idx3'), read_idx(args.data_dir, f'{name}-labels-idx1'))
        for name in ('train', 't10k')
    }
    model = Segmenter(pretrained=not args.scratch)
    train(model, *make_scenes(*parts['train'], args.images, SIDE, seed=0), args.epochs)
    found = {}
    for side in (SIDE, 2 * SIDE):
        scenes = make_scenes(*parts['t10k'], args.test_images, side, seed=side)
        pixels, found[side] = evaluate(model, *scenes)
        print(f'{side} px: pixels {pixels:.1f} %, mean IoU {found[side]:.1f} %', flush=True)
    if args.picture:
        draw(model, *scenes, args.picture)
    return found


if __name__ == '__main__':
    main()
