"""The validation images that a model finds hardest, and the classes it takes for one another.

Noted within an evaluation that takes place anyway, from numbers that it has: no second pass, no waiting for the
device. Nothing depends on it, so whatever fails here is told and left out.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from nprf_vit.data.samples import EvalSamples
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.output.atomic_file import write_text
from nprf_vit.errors import first_line
from nprf_vit.html_page.build import picture_url

from .tasks.base import PerImage, Task

FILE = 'validation.json'
WORST, PAIRS = 16, 8
THUMBNAIL = 96  # pixels
_MOST = 20_000  # wrong answers that a rank hands over


@dataclass(frozen=True)
class Answer:
    """What a model said of one image."""

    index: int
    loss: float
    target: int | None = None
    predicted: int | None = None
    p: float | None = None  # of the predicted class

    def rank(self) -> tuple[float, int]:
        """Worst first; worse than any number is none."""
        return (-math.inf if math.isnan(self.loss) else -self.loss, self.index)


class HardImages:
    """Collects answers of one of the evaluated models.

    Args:
        prefix: Which of them: '' or 'ema_'.
    """

    def __init__(self, task: Task, prefix: str = '') -> None:
        self.task, self.prefix = task, prefix
        self.parts: list[tuple[torch.Tensor, PerImage]] = []
        self.problem: str | None = None

    def observe(self, prefix: str, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor | None) -> None:
        """The outputs of a batch, on the device."""
        if prefix != self.prefix or indices is None or self.problem:
            return
        try:
            found = self.task.per_image(logits, targets)
            if found is not None:
                self.parts.append((indices, found))
        except Exception as error:  # a task of the user's own may inherit what does not fit it
            self.problem = first_line(error)

    def gather(self, place: Place) -> list[Answer]:
        """The wrong answers and the worst ones of all ranks, worst first. Collective."""
        try:
            own = [] if self.problem else self._own()
        except Exception as error:
            own, self.problem = [], first_line(error)
        return sorted((answer for part in place.gather(own) for answer in part), key=Answer.rank)

    def _own(self) -> list[Answer]:
        if not self.parts:
            return []
        index = torch.cat([indices for indices, _ in self.parts]).tolist()
        columns = [index] + [
            [None] * len(index) if parts[0] is None else torch.cat(parts).cpu().tolist()
            for parts in zip(*(found for _, found in self.parts))
        ]
        answers = sorted((Answer(*values) for values in zip(*columns)), key=Answer.rank)
        wrong = [answer for answer in answers[WORST:] if answer.target != answer.predicted]
        return answers[:WORST] + wrong[:_MOST]


def confused_pairs(answers: list[Answer]) -> list[tuple[Any, Any, int, Answer]]:
    """(class, what it was taken for, how often, the clearest case), most frequent first."""
    wrong = [answer for answer in answers if answer.predicted is not None and answer.target != answer.predicted]
    first: dict[tuple[Any, Any], Answer] = {}
    for answer in wrong:
        first.setdefault((answer.target, answer.predicted), answer)
    counts = Counter((answer.target, answer.predicted) for answer in wrong)
    pairs = sorted(counts, key=lambda pair: (-counts[pair], pair))[:PAIRS]
    return [(*pair, counts[pair], first[pair]) for pair in pairs]


def describe(answers: list[Answer], samples: EvalSamples, model: nn.Module, hard: HardImages) -> dict[str, Any]:
    """What the page shows of them, with small pictures. Reads a few images again."""
    source = samples.source
    names = getattr(getattr(source, 'dataset', source), 'class_names', None) or getattr(source, 'class_names', None)

    def named(number: int | None) -> str | None:
        return None if number is None else names[number] if names and number < len(names) else str(number)

    def shown(answer: Answer) -> dict[str, Any]:
        about: dict[str, Any] = {
            'index': answer.index,
            'loss': round(answer.loss, 5),
            'p': answer.p and round(answer.p, 4),
        }
        about |= {'target': named(answer.target), 'predicted': named(answer.predicted)}
        return about | {'picture': _thumbnail(source[answer.index][0], getattr(model, 'levels', 256))}

    return {
        'model': hard.prefix,
        'unit': hard.task.curve.label if answers and answers[0].predicted is None else 'loss',
        'worst': [shown(answer) for answer in answers[:WORST]],
        'confused': [
            {'target': named(target), 'predicted': named(predicted), 'count': count, 'case': shown(case)}
            for target, predicted, count, case in confused_pairs(answers)
        ],
    }


def _thumbnail(image: Any, levels: int) -> str:
    if isinstance(image, Image.Image):
        small = image.copy()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        return picture_url(np.asarray(small).reshape(small.height, small.width, -1))
    return picture_url(np.rint(image * (255 / (levels - 1))).astype(np.uint8))


def write_hard_images(folder: Path, found: dict[str, Any]) -> None:
    write_text(folder / FILE, json.dumps(found) + '\n')
