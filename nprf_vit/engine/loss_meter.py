"""Training loss over an epoch and over a logging interval, the same to the last bit however often it is interrupted."""

import enum
import math
from typing import Any


class Span(enum.Enum):
    """What a mean is taken over; the values are names in checkpoints."""

    EPOCH = 'epoch'
    INTERVAL = 'interval'


class LossMeter:
    """Adds one loss per step, a mean over ranks, in step order: the sums do not depend on when they were asked for."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(Span, 0.0)
        self.counts = dict.fromkeys(Span, 0)

    def add(self, loss: float) -> None:
        for span in Span:
            self.sums[span] += loss
            self.counts[span] += 1

    def take(self, span: Span) -> float:
        """The mean over a span so far, starting it anew; nan where every step was skipped."""
        mean = self.sums[span] / self.counts[span] if self.counts[span] else math.nan
        self.sums[span], self.counts[span] = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, dict[str, Any]]:
        sums = {span.value: self.sums[span] for span in Span}
        return {'sums': sums, 'counts': {span.value: self.counts[span] for span in Span}}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        self.sums = {span: state['sums'][span.value] for span in Span}
        self.counts = {span: state['counts'][span.value] for span in Span}
