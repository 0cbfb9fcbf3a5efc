"""Epochs of a given number of steps over a data set of any size."""

from collections.abc import Iterator

from .batch_plan import BatchPlan
from .sample_order import Key, SampleOrder, TrainBatches


class FixedLengthBatches(TrainBatches):
    """As `TrainBatches`, but an epoch is `steps` steps, and the passes over the data go on across epochs.

    Step s of the run takes step s % P of pass s // P, P steps being a pass, wherever epochs begin and end.
    """

    def __init__(self, order: SampleOrder, plan: BatchPlan, rank: int, steps: int) -> None:
        super().__init__(order, plan, rank)
        self.steps = steps

    def __iter__(self) -> Iterator[list[Key]]:
        step, end = self.epoch * self.steps + self.first_step, (self.epoch + 1) * self.steps
        passes = TrainBatches(self.order, self.plan, self.rank)
        while step < end:
            number, first = divmod(step, self.order.steps_per_epoch)
            passes.start(number, first)
            for i, batch in enumerate(passes):
                if step + i // self.plan.accumulation == end:
                    return
                yield batch
            step += self.order.steps_per_epoch - first
