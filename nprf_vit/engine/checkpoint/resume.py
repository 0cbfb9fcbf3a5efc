"""Which checkpoint a run continues from."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nprf_vit.config.schema import Config
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.errors import InputError

from .file import checkpoints, newest_good, read_checkpoint
from .state import check_continues


@dataclass
class ResumePoint:
    """A checkpoint to continue from, if any."""

    path: str = ''
    content: dict[str, Any] | None = None
    passed_over: dict[Path, str] = field(default_factory=dict)  # newer files and what is wrong with them; main rank


def find_checkpoint(
    folder: Path, resume: str | None, config: Config, place: Place, known_bad: dict[Path, str] | None = None
) -> ResumePoint:
    """The main rank chooses, so that all ranks take the same file.

    Args:
        known_bad: Files that turned out to be wrong when a run was built from them, and in what.
    """

    def check(content: dict[str, Any], origin: str) -> None:
        check_continues(content, origin, config.to_dict())

    if not resume:
        return ResumePoint()
    if resume != 'auto':
        content = read_checkpoint(resume)
        check(content, resume)
        return ResumePoint(resume, content)
    found = ResumePoint()

    def choose() -> tuple[str, int]:
        path, found.content, found.passed_over = newest_good(folder, check, known_bad)
        return (str(path), found.content['step']) if found.content else ('', 0)

    found.path, step = place.from_main(choose)
    if found.path and found.content is None:
        found.content = read_checkpoint(found.path)
    if found.content and found.content['step'] != step:  # a network file system may show another version here
        raise InputError(f'{found.path} is of step {found.content["step"]} on rank {place.rank}, of {step} on rank 0')
    return found


def restarted(folder: Path, place: Place) -> bool:
    """Whether torchrun has started this group anew after a failure and there is something to continue from."""
    # an agent counts its own failures only, so the ranks of another one may know nothing of the restart
    again = place.any(int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)) > 0)
    return again and place.from_main(lambda: bool(checkpoints(folder)))
