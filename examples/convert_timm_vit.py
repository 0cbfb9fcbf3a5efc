"""Convert a timm ViT that was trained with softmax, and measure what that costs.

python examples/convert_timm_vit.py

A small ViT of timm's learns scikit-learn's digits. `nprf_vit.convert` gives its attention random features in the place
of softmax and keeps every weight: no bias is added, and queries and keys are not normalized, as the weights were
learned without. The fewer features, the more that costs, and a short fine-tune gives most of it back. Then the other
cost: multiply-adds of one attention layer of DeiT-base size, counted, not timed.

The 360 digits held out are those of `configs/digits.yaml`; one image is 0.28 %.

It prints:

    softmax, 40 epochs: top-1 90.83
      8 features: converted 32.50, after 3 more epochs 78.06
     32 features: converted 37.50, after 3 more epochs 78.61
    128 features: converted 57.50, after 3 more epochs 87.50
    multiply-adds of one layer, billions: image side, softmax, 32 features
      224 px     0.52     0.48
      512 px     4.03     2.52
     1024 px    35.43    10.07
     2048 px   450.97    40.28
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import nprf_vit
from nprf_vit.data.datasets.digits import Digits

FEATURES = (8, 32, 128)


def make_vit() -> nn.Module:
    """timm's ViT with a class token and a position embedding, 0.14 M parameters."""
    return timm.create_model(
        'vit_tiny_patch16_224',
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=4,
        num_heads=4,
        mlp_ratio=2,
    )


def digits(split: str, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (B, 1, 8, 8) of mean 0 and deviation 1, nearly, and classes."""
    data = Digits(split)
    images = (torch.from_numpy(data.levels).float()[:, None] / 16 - 0.3) / 0.37
    chosen = torch.linspace(0, len(data) - 1, count or len(data)).long()  # they are sorted by class
    return images[chosen], torch.from_numpy(data.targets).long()[chosen]


def train(model: nn.Module, epochs: int, lr: float, count: int | None = None) -> None:
    model.train()
    images, targets = digits('train', count)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * (len(images) // 32))
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(32)[: len(images) // 32]:
            dy, dx = torch.randint(-1, 2, (2,)).tolist()  # the only augmentation: moved by a pixel
            logits = model(images[batch].roll((dy, dx), (2, 3)))
            loss = F.cross_entropy(logits, targets[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def top1(model: nn.Module) -> float:
    images, targets = digits('validation')
    return 100 * (model.eval()(images).argmax(-1) == targets).float().mean().item()


def count_macs(layer: nn.Module, side: int) -> float:
    """Billions of multiply-adds for one image of side×side tokens; on the meta device nothing is computed."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        layer(torch.empty(1, side * side, 768, device='meta'))
    return counter.get_total_flops() / 2e9


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--epochs', type=int, default=40)
    parser.add_argument('--tune-epochs', type=int, default=3)
    parser.add_argument('--images', type=int, help='to learn from, at least 32; default: all 1437')
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    vit = make_vit()
    train(vit, args.epochs, 2e-3, args.images)
    found = {'softmax': top1(vit)}
    print(f'softmax, {args.epochs} epochs: top-1 {found["softmax"]:.2f}', flush=True)
    for features in FEATURES:
        model = nprf_vit.convert(vit, kernel='prf', feature_dim=features)
        before = top1(model)
        train(model, args.tune_epochs, 5e-4, args.images)
        found |= {f'{features} converted': before, f'{features} tuned': top1(model)}
        tuned = f'after {args.tune_epochs} more epochs {found[f"{features} tuned"]:.2f}'
        print(f'{features:>3} features: converted {before:.2f}, {tuned}', flush=True)
    print('multiply-adds of one layer, billions: image side, softmax, 32 features')
    with torch.device('meta'):
        layers = Attention(768, 12, qkv_bias=True), nprf_vit.KernelAttention(768, 12, normalize=False)
    for pixels in (224, 512, 1024, 2048):
        softmax, kernelized = (count_macs(layer, pixels // 16) for layer in layers)
        print(f'{pixels:>5} px {softmax:>8.2f} {kernelized:>8.2f}')
    return found


if __name__ == '__main__':
    main()
