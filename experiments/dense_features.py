"""Patch features of a photograph at three resolutions, drawn by their principal components.

python -m experiments.dense_features            ten minutes on one busy core; writes to a new folder in output/
python -m experiments.dense_features --quick    a few steps on small images; writes nothing unless --output says where

The backbone is an `nprf_deit_tiny` that learns to fill in masked patches of scikit-learn's two sample photographs, at
112 px; nobody publishes weights for this family yet. Then it sees one of them at other sizes, none of them square, its
7x7 bias table extended by a constant per head.
"""

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from tqdm import tqdm

import nprf_vit  # noqa: F401  registers the models
from benchmarks.report import Report, options, save_figure

MODEL, TRAINED, PATCH = 'nprf_deit_tiny', 112, 16
HEIGHTS = (224, 512, 1024)


def photographs() -> torch.Tensor:
    """(2, 3, 427, 640): a temple and a flower, normalized."""
    images = torch.stack([torch.from_numpy(x.copy()) for x in load_sample_images().images])
    mean, std = (torch.tensor(x)[:, None, None] for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return (images.permute(0, 3, 1, 2) / 255 - mean) / std


def random_crops(images: torch.Tensor, number: int) -> torch.Tensor:
    """Square pieces of a quarter to all of the photographs' height, mirrored or not: (number, 3, 112, 112)."""
    crops = []
    for _ in range(number):
        image = images[torch.randint(len(images), ())]
        side = int(torch.empty(()).uniform_(0.25, 1) * image.shape[1])
        top, left = (int(torch.randint(s - side + 1, ())) for s in image.shape[1:])
        crop = image[:, top : top + side, left : left + side]
        crop = crop.flip(-1) if torch.rand(()) < 0.5 else crop
        crops.append(F.interpolate(crop[None], (TRAINED, TRAINED), mode='bilinear', antialias=True))
    return torch.cat(crops)


def learn(images: torch.Tensor, steps: int, options: dict) -> nn.Module:
    """A backbone that predicts the pixels of hidden patches from those it sees."""
    model = timm.create_model(MODEL, img_size=TRAINED, num_classes=0, **options)
    head = nn.Linear(model.embed_dim, 3 * PATCH**2)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for _ in (progress := tqdm(range(steps))):
        target = random_crops(images, 16)
        hidden = torch.rand(len(target), 1, *(s // PATCH for s in target.shape[2:])) < 0.5
        mask = F.interpolate(hidden.float(), target.shape[2:])
        guess = head(model.forward_features(target * (1 - mask)))  # B, N, 3·16·16
        patches = F.unfold(target, PATCH, stride=PATCH).transpose(1, 2)  # B, N, 3·16·16
        loss = (guess - patches).square().mean(-1)[hidden.flatten(1)].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.set_description(f'loss {loss.item():.3f}')
    return model


def as_backbone(model: nn.Module, options: dict) -> nn.Module:
    """The same weights as a detector or segmenter takes them: a map (B, C, H/16, W/16) for images of any size."""
    backbone = timm.create_model(
        MODEL,
        features_only=True,
        out_indices=[-1],
        img_size=TRAINED,
        dynamic_img_size=True,
        rel_pos_extend='extend',
        **options,
    )
    missing, unexpected = backbone.model.load_state_dict(model.state_dict(), strict=False)
    if missing or set(unexpected) - {'norm.weight', 'norm.bias'}:
        raise RuntimeError(f'the weights do not fit: missing {missing}, unexpected {unexpected}')
    return backbone.eval()


def principal_colours(maps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Maps (C, H, W) to (H, W, 3): the first three components of all maps together, so that colours mean the same."""
    tokens = torch.cat([F.normalize(x, dim=0).flatten(1).T[:: max(1, x[0].numel() // 300)] for x in maps])
    mean = tokens.mean(0)
    axes = torch.linalg.svd(tokens - mean, full_matrices=False).Vh[:3]
    projected = [(F.normalize(x, dim=0).permute(1, 2, 0) - mean) @ axes.T for x in maps]
    every = torch.cat([x.flatten(0, 1) for x in projected])
    low, high = every.quantile(0.02, dim=0), every.quantile(0.98, dim=0)
    return [((x - low) / (high - low)).clamp(0, 1) for x in projected]


def plot(image: torch.Tensor, pictures: list[torch.Tensor], sizes: list[tuple[int, int]], path: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(pictures) + 1, figsize=(4 * (len(pictures) + 1), 3.2))
    mean, std = (torch.tensor(x) for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    axes[0].imshow((image.permute(1, 2, 0) * std + mean).clamp(0, 1))
    axes[0].set_title('photograph')
    for ax, picture, (height, width) in zip(axes[1:], pictures, sizes):
        ax.imshow(picture, interpolation='nearest')
        ax.set_title(f'{height}×{width} px, {picture.shape[0]}×{picture.shape[1]} patches')
    for ax in axes:
        ax.axis('off')
    fig.tight_layout()
    save_figure(fig, path, 100)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument('--steps', type=int, default=400, help='training steps')
    args = parser.parse_args(argv)
    report = Report.of(args, 'dense_features')
    torch.manual_seed(0)
    smaller = {'embed_dim': 32, 'num_heads': 2, 'depth': 2} if args.quick else {}
    images = photographs()
    model = learn(images, 3 if args.quick else args.steps, smaller)
    backbone = as_backbone(model, smaller)
    sizes = [(h, h * 3 // 2 // PATCH * PATCH) for h in ((32, 64, 96) if args.quick else HEIGHTS)]
    maps = []
    with torch.inference_mode():
        for size in sizes:
            (features,) = backbone(F.interpolate(images[:1], size, mode='bicubic', antialias=True))
            print(f'{size[0]}x{size[1]} px: features {tuple(features.shape)}')
            maps.append(features[0])
    report.save({}, {'dense_features': lambda path: plot(images[0], principal_colours(maps), sizes, path)})


if __name__ == '__main__':
    main()
