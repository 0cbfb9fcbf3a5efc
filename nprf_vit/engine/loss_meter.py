"""Training loss over an epoch and over a logging interval, the same to the last bit however often it is interrupted."""

import enum
import math
from typing import Any

import torch

from nprf_vit.engine.distributed.process_group import Place


class Span(enum.Enum):
    """What a mean is taken over; the values are names in checkpoints."""

    EPOCH = 'epoch'
    INTERVAL = 'interval'


class LossMeter:
    """Collects one loss per step on the device and averages over ranks only when someone asks.

    Each step's loss becomes a Python float by an average over ranks in float64, and the floats are added in step order,
    so the sums do not depend on when they were asked for.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.pending: list[torch.Tensor] = []
        self.sums = dict.fromkeys(Span, 0.0)
        self.counts = dict.fromkeys(Span, 0)

    def add(self, loss: torch.Tensor) -> None:
        self.pending.append(loss)

    def flush(self) -> list[float]:
        """Bring the pending losses in; collective, so all ranks call it at the same steps."""
        if not self.pending:
            return []
        losses = torch.stack(self.pending).double()
        values: list[float] = (self.place.sum(losses) / self.place.world).tolist()
        self.pending.clear()
        for span in Span:
            for value in values:
                self.sums[span] += value
            self.counts[span] += len(values)
        return values

    def take(self, span: Span) -> float:
        """The mean over a span so far, starting it anew; nan where every step was skipped."""
        self.flush()
        mean = self.sums[span] / self.counts[span] if self.counts[span] else math.nan
        self.sums[span], self.counts[span] = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, dict[str, Any]]:
        self.flush()
        sums = {span.value: self.sums[span] for span in Span}
        return {'sums': sums, 'counts': {span.value: self.counts[span] for span in Span}}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        self.pending.clear()
        self.sums = {span: state['sums'][span.value] for span in Span}
        self.counts = {span: state['counts'][span.value] for span in Span}
