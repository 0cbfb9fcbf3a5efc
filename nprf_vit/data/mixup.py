"""Mixup and cutmix on fixed blocks of the global batch."""

from typing import Any

import torch
from timm.data import Mixup

from .seeding import derive_seed, seeded


class BlockMixup:
    """timm's Mixup, one block at a time, each with random numbers of its own from (seed, step, block).

    Which images meet and how is thereby the same on any number of devices and with any accumulation.
    """

    def __init__(self, block: int, seed: int, **mixup_args: Any) -> None:
        self.mixup = Mixup(**mixup_args)
        self.block, self.seed = block, seed

    def __call__(
        self, images: torch.Tensor, targets: torch.Tensor, step: int, first_slot: int, enabled: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix a micro-batch (B, C, H, W), (B,) that starts at `first_slot` of its global batch; images in place."""
        assert len(images) % self.block == 0 and first_slot % self.block == 0
        self.mixup.mixup_enabled = enabled
        soft = []
        for start in range(0, len(images), self.block):
            part = slice(start, start + self.block)
            with seeded(derive_seed(self.seed, 'mix', step, (first_slot + start) // self.block)):
                soft.append(self.mixup(images[part], targets[part])[1])  # block, num_classes
        return images, torch.cat(soft)
