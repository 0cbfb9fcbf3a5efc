"""Steps without an update and images that cannot be read or augmented: counted, written down, and limited."""

from pathlib import Path
from typing import Any

from nprf_vit.data.batch import FaultKind, SampleFault
from nprf_vit.engine.checkpoint.state import Progress
from nprf_vit.engine.output.csv_file import write_rows
from nprf_vit.engine.output.line_log import SkipLog

from ..errors import RunError
from .build import Training
from .train_step import Outcome

LISTED = 100  # failed augmentations that are named: unlike unreadable files, there may be new ones for ever
MAX_UNAUGMENTED = 0.01  # of all samples so far; more is another augmentation than the configured one


class Faults:
    """What went wrong on the way without ending the run. All ranks count alike; the main rank writes."""

    def __init__(self, run: Training, progress: Progress, folder: Path, log: SkipLog | None) -> None:
        self.run, self.progress, self.folder, self.log = run, progress, folder, log

    def note(self, outcome: Outcome) -> list[str]:
        """Count the faults of a step; returns lines for the log. Collective when something is wrong."""
        messages = self._note_skip(outcome)
        if outcome.bad_images:
            messages += self._note_images(outcome)
        return messages

    def _note_skip(self, outcome: Outcome) -> list[str]:
        run, step = self.run, self.progress.step
        if outcome.non_finite is None:
            self.progress.skipped.in_a_row = 0
            return []
        self.progress.skipped.add()
        suspects = sorted(slot for slots in run.place.gather(outcome.suspects) for slot in slots)
        images = run.data.indices(step - 1)
        reason = outcome.non_finite.value
        record: dict[str, Any] = {'step': step, 'reason': reason, 'images': images}
        if images is not None:
            record['suspects'] = [images[slot] for slot in suspects]
        if self.log is not None:
            self.log.add(record)
        return [f'step {step} skipped: non-finite {reason}; its images are in skipped_steps.jsonl']

    def _note_images(self, outcome: Outcome) -> list[str]:
        progress = self.progress
        faults = [fault for part in self.run.place.gather(outcome.faults) for fault in part]
        failed = [fault for fault in faults if fault.kind is FaultKind.UNAUGMENTED]
        unreadable = [fault for fault in faults if fault.kind is FaultKind.UNREADABLE]
        progress.failed_augmentations += len(failed)
        new = _add(progress.bad_images, unreadable)
        new += _add(progress.unaugmented, failed, LISTED - len(progress.unaugmented))
        return [f'{problem}; another training image takes its place' for problem in new]

    def check(self) -> None:
        """Raise when the counts exceed their limits."""
        skipped, config = self.progress.skipped, self.run.config
        if skipped.in_a_row >= config.max_skipped_steps:
            raise RunError(
                f'{skipped.in_a_row} steps in a row up to step {self.progress.step} had a non-finite loss or '
                f'gradient (max_skipped_steps {config.max_skipped_steps}): no update was made from them'
            )
        if len(self.progress.bad_images) > config.max_bad_images:
            raise RunError(
                f'{len(self.progress.bad_images)} training images cannot be read (max_bad_images '
                f'{config.max_bad_images}), the last: {list(self.progress.bad_images.values())[-1]}'
            )
        failed, samples = self.progress.failed_augmentations, self.progress.step * config.global_batch
        if failed > max(config.max_bad_images, MAX_UNAUGMENTED * samples):
            raise RunError(
                f'{failed} of {samples} augmentations failed (more than max_bad_images {config.max_bad_images} and '
                f'than {MAX_UNAUGMENTED:.0%}), the last listed: {list(self.progress.unaugmented.values())[-1]}'
            )

    def write(self) -> None:
        """Append to skipped_steps.jsonl and rewrite bad_images.csv; neither exists without a fault. Main rank only."""
        if self.log is not None:
            self.log.flush()
        path = self.folder / 'bad_images.csv'
        listed = [pair for found in (self.progress.bad_images, self.progress.unaugmented) for pair in found.items()]
        if not listed:
            path.unlink(missing_ok=True)
            return
        problems = [(index, ' '.join(text.replace(',', ';').split())) for index, text in sorted(listed)]
        write_rows(path, [{'index': index, 'problem': text} for index, text in problems])


def _add(known: dict[int, str], found: list[SampleFault], room: int | None = None) -> list[str]:
    """Note what is wrong with images that were not known, at most `room` of them; returns the new problems."""
    ordered = sorted(found, key=lambda fault: (fault.index, fault.problem))
    new = {fault.index: fault.problem for fault in ordered if fault.index not in known}
    new = dict(list(new.items())[:room])
    known |= new
    return list(new.values())
