"""The fixed global order of training samples, and each rank's share of it.

A step takes G = global_batch slots of the order. Slot s of an epoch holds image perm[s // repeats] in its repetition
s % repeats, so repeated augmentation needs no second process. Within a step the slots are dealt to G / block blocks
like cards: block b gets slots b, b + G/block, b + 2G/block, ... Mixup acts inside a block, and dealing keeps the
repetitions of one image in different blocks, as DeiT's sampler keeps them on different GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nprf_vit.errors import InputError

from .batch_plan import BatchPlan
from .seeding import derive_seed


class Key(NamedTuple):
    """All that a training sample depends on besides the seed."""

    epoch: int
    image: int  # its index
    repeat: int


@dataclass(frozen=True)
class SampleOrder:
    num_samples: int
    global_batch: int
    seed: int
    repeats: int = 1
    block: int = 1

    def __post_init__(self) -> None:
        if self.num_samples < self.global_batch:
            raise InputError(
                f'the training set has {self.num_samples} images, fewer than global_batch {self.global_batch}: '
                'an epoch would have no step'
            )
        if self.global_batch % self.block:
            raise InputError(f'mixup_block {self.block} does not divide global_batch {self.global_batch}')

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.global_batch

    def epoch(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Image indices and repetition numbers of one epoch, each (steps, global_batch)."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 'order', epoch))
        permutation = torch.randperm(self.num_samples, generator=generator)
        steps, blocks = self.steps_per_epoch, self.global_batch // self.block
        slots = torch.arange(steps * self.global_batch)
        slots = slots.view(steps, self.block, blocks).transpose(1, 2).reshape(steps, self.global_batch)
        return permutation[slots // self.repeats], slots % self.repeats


class TrainBatches:
    """Batch sampler: one rank's micro-batches of the global order, from any step of any epoch on.

    Micro-batch a of rank r holds the step's slots from (a · world + r) · micro on. The union over ranks and
    micro-batches is the same for every world size, and no block is split when block divides micro.
    """

    def __init__(self, order: SampleOrder, plan: BatchPlan, rank: int = 0) -> None:
        assert plan.global_batch == order.global_batch and plan.micro % order.block == 0
        self.order, self.plan, self.rank = order, plan, rank
        self.epoch, self.first_step = 0, 0

    def start(self, epoch: int, first_step: int) -> None:
        """Where the next iteration begins."""
        self.epoch, self.first_step = epoch, first_step

    def indices(self, step: int) -> list[int]:
        """The images of global batch number `step` of the run, all ranks together, in slot order."""
        number, row = divmod(step, self.order.steps_per_epoch)
        return self.order.epoch(number)[0][row].tolist()

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        indices, repeats = self.order.epoch(epoch)
        for step in range(self.first_step, self.order.steps_per_epoch):
            for micro_step in range(self.plan.accumulation):
                first = self.plan.first_slot(micro_step, self.rank)
                part = slice(first, first + self.plan.micro)
                pairs = zip(indices[step, part].tolist(), repeats[step, part].tolist())
                yield [Key(epoch, index, repeat) for index, repeat in pairs]


class EvalBatches:
    """Batch sampler: every world-th image from `rank` on, without padding, so each image is seen exactly once."""

    def __init__(self, num_samples: int, batch: int, rank: int = 0, world: int = 1) -> None:
        self.indices = range(rank, num_samples, world)
        self.batch = batch

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, len(self.indices), self.batch):
            yield list(self.indices[first : first + self.batch])

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch)
