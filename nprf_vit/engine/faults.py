"""Steps without an update and images that cannot be read or augmented: counted, written down, and limited."""

from pathlib import Path

from nprf_vit.engine.checkpoint.state import Progress
from nprf_vit.engine.output.folder import write_rows
from nprf_vit.engine.output.line_log import SkipLog

from ..data.samples import is_augmentation
from ..errors import RunError
from .build import Training
from .train_step import Outcome

LISTED = 100  # failed augmentations that are named: unlike unreadable files, there may be new ones for ever
MAX_UNAUGMENTED = 0.01  # of all samples so far; more is another augmentation than the configured one


class Faults:
    """What went wrong on the way without ending the run. All ranks count alike; the main rank writes."""

    def __init__(self, run: Training, progress: Progress, folder: Path, log: SkipLog | None):
        self.run, self.progress, self.folder, self.log = run, progress, folder, log

    def note(self, outcome: Outcome) -> list[str]:
        """Count the faults of a step; returns lines for the log. Collective when something is wrong."""
        said = self._note_skip(outcome)
        if outcome.bad_images:
            said += self._note_images(outcome)
        return said

    def _note_skip(self, outcome: Outcome) -> list[str]:
        counts, run, step = self.progress.skipped, self.run, self.progress.step
        if outcome.reason is None:
            counts['in_a_row'] = 0
            return []
        for name in counts:
            counts[name] += 1
        suspects = sorted(slot for slots in run.place.gather(outcome.suspects) for slot in slots)
        images = run.data.indices(step - 1)
        record = {'step': step, 'reason': outcome.reason, 'images': images}
        if images is not None:
            record['suspects'] = [images[slot] for slot in suspects]
        if self.log is not None:
            self.log.add(record)
        return [f'step {step} skipped: non-finite {outcome.reason}; its images are in skipped_steps.jsonl']

    def _note_images(self, outcome: Outcome) -> list[str]:
        progress = self.progress
        notes = [_split(note) for part in self.run.place.gather(outcome.notes) for note in part]
        failed = [(index, text) for index, text in notes if is_augmentation(text)]
        unreadable = [(index, text) for index, text in notes if not is_augmentation(text)]
        progress.failed_augmentations += len(failed)
        new = _add(progress.bad_images, unreadable)
        new += _add(progress.unaugmented, failed, LISTED - len(progress.unaugmented))
        return [f'{text}; another training image takes its place' for text in new]

    def check(self) -> None:
        """Raise when the counts exceed their limits."""
        counts, config = self.progress.skipped, self.run.config
        if counts['in_a_row'] >= config.max_skipped_steps:
            raise RunError(
                f'{counts["in_a_row"]} steps in a row up to step {self.progress.step} had a non-finite loss or '
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


def _split(note: str) -> tuple[int, str]:
    index, _, text = note.partition(' ')
    return int(index), text


def _add(known: dict[int, str], found: list[tuple[int, str]], room: int | None = None) -> list[str]:
    """Note what is wrong with images that were not known, at most `room` of them; returns the new texts."""
    new = {index: text for index, text in sorted(found) if index not in known}
    new = dict(list(new.items())[:room])
    known |= new
    return list(new.values())
