"""Write the report of one or several training runs as one HTML file: curves, differences, faults, hard images.

python -m nprf_vit.report output/NAME [output/OTHER ...] --output report.html
"""

import argparse
import contextlib
import sys
from pathlib import Path

from .command import check_path, run_command
from .config.yaml_file import override
from .engine.build import build_evaluation
from .engine.checkpoint.saver import BEST
from .engine.distributed.process_group import process_group
from .engine.eval_loop import evaluate
from .engine.hard_images import HardImages, describe
from .engine.model import build_model
from .engine.output.eval_progress import show_progress
from .engine.output.result_file import ResultFile
from .engine.run_report.page import NAME, report_page
from .engine.run_report.read_run import RunRecord, read_run
from .engine.validate import load_models
from .errors import Exit, InputError, NotSaved, RunError, exit_with
from .html_page.build import size_of
from .processes import print_any_name


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    doc = __doc__ or ''
    parser = argparse.ArgumentParser(prog='python -m nprf_vit.report', description=doc.splitlines()[0])
    parser.add_argument('runs', nargs='+', metavar='RUN', help='output folder of train.py')
    parser.add_argument('--output', default=NAME, metavar='FILE', help=f'default {NAME}')
    parser.add_argument(
        '--images',
        action='store_true',
        help=f'evaluate {BEST} of each run for its hardest images; needs the data',
    )
    parser.add_argument('--data-dir', metavar='DIR', help='for --images: the data, if it is not where the run had it')
    return parser.parse_args(argv)


def find_hard_images(run: RunRecord, data_dir: str | None) -> None:
    """Evaluate the best weights of a run once more; takes as long as validate.py does."""
    config = override(run.config, data_dir=data_dir) if data_dir else run.config
    checkpoint = str(run.folder / BEST)
    with process_group(config.device, config.threads, config.stall_timeout) as place:
        if place.world > 1:
            raise InputError('a report is made by one process: start it without torchrun')
        model = build_model(config, fresh=False, checkpoint=checkpoint).to(place.device)
        models = load_models(model, checkpoint, config)
        part = build_evaluation(config, place, model)
        if part.num_images is None:
            raise InputError(f'--images: {config.dataset} is a stream, whose images have no number to find them by')
        hard = HardImages(part.task, 'ema_' if config.eval_metric.startswith('ema_') else '')
        batches = show_progress(part.batches, place, part.num_images)
        evaluate(models, batches, part.task, place, part.num_images, part.autocast, observe=hard.observe)
        answers = hard.gather(place)
    if hard.problem:
        raise InputError(f'--images: no losses of single images in task {config.task}: {hard.problem}')
    run.hard_images = describe(answers, getattr(part.batches, 'dataset'), model, hard)  # noqa: B009 - an Iterable to mypy


def main(argv: list[str] | None = None) -> int:
    """Returns one of `nprf_vit.exit_codes.Exit`."""
    args = parse(argv)
    print_any_name()
    try:
        for path in args.runs:
            check_path(path, 'RUN')
        for name in ('output', 'data_dir'):
            check_path(getattr(args, name), '--' + name.replace('_', '-'))
        output = ResultFile(args.output, '--output')
        runs = [read_run(Path(path)) for path in args.runs]
        for run in runs if args.images else []:
            find_hard_images(run, args.data_dir)
        page = report_page(runs)
        try:
            output.write(page)
        except OSError as error:
            raise NotSaved(f'cannot write {args.output}: {error.strerror or error}') from None
    except (InputError, RunError) as error:
        return exit_with(error)
    with contextlib.suppress(OSError):  # nobody may listen any more
        for run in runs:
            print(f'{run.folder}: {run.state}')
        print(f'wrote {args.output}, {size_of(page)}; open it in a browser', flush=True)
    return Exit.DONE


if __name__ == '__main__':
    sys.exit(run_command(main))
