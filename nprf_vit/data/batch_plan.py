"""How the global batch is cut: per-device batch × accumulation × world size = global batch."""

from dataclasses import dataclass

from nprf_vit.errors import InputError


@dataclass(frozen=True)
class BatchPlan:
    global_batch: int
    world: int
    micro: int
    accumulation: int

    def first_slot(self, micro_step: int, rank: int) -> int:
        """Where a rank's micro-batch begins in its global batch."""
        return (micro_step * self.world + rank) * self.micro

    def __str__(self) -> str:
        return (
            f'global batch {self.global_batch} = {self.micro} per device x {self.accumulation} x {self.world} devices'
        )


def plan_batches(global_batch: int, world: int, batch_size: int, block: int = 1) -> BatchPlan:
    """The largest per-device batch of at most `batch_size` that divides the device's share and holds whole blocks."""
    if global_batch % world:
        divisors = [w for w in range(1, global_batch + 1) if global_batch % w == 0]
        near = sorted(divisors, key=lambda w: abs(w - world))[:3]
        raise InputError(
            f'world size {world} does not divide global_batch {global_batch}: '
            f'use {", ".join(map(str, sorted(near)))} processes, or change global_batch'
        )
    share = global_batch // world
    for micro in range(min(batch_size, share), 0, -1):
        if share % micro == 0 and micro % block == 0:
            return BatchPlan(global_batch, world, micro, share // micro)
    raise InputError(
        f'each of {world} devices takes {share} of global_batch {global_batch}, and no batch of at most batch_size '
        f'{batch_size} divides {share} and holds whole mixing blocks of {block}: '
        'raise batch_size, use fewer devices, or choose a mixup_block that divides the share'
    )
