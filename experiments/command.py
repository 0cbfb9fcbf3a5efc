"""The command line that the experiments share: where results go, what is continued, when to stop."""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report import OUTPUT, QUICK, Report, fresh_folder, shipped
from experiments.runs import Runner, Unfinished
from nprf_vit.errors import InputError

UNFINISHED = 75  # exit code of a command that is to be continued: "temporary failure" in sysexits.h
NEWEST = Path()  # --continue without a folder


def parse(name: str, about: str, data: bool, argv: list[str] | None, images: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='tiny models, a few steps; gives no results')
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument('--output', type=Path, help='folder to begin in (default: a new one in output/)')
    where = {'dest': 'earlier', 'type': Path, 'nargs': '?', 'const': NEWEST, 'metavar': 'FOLDER'}
    newest = f'newest output/{name}-*'
    folder.add_argument('--continue', **where, help=f'go on with what is there (default: the {newest})')
    if data:
        parser.add_argument('--data-dir', help='folder of the images, as in configs/fashion_mnist.yaml')
    if images:
        parser.add_argument(
            '--images', choices=images, default=images[0], help=f'what is learned (default: {images[0]})'
        )
    parser.add_argument('--work', type=Path, help='folder of trained runs, to share them (default: runs in the other)')
    parser.add_argument('--jobs', type=int, help='processes, of one thread each (default: 2; quick: 1)')
    parser.add_argument('--minutes', type=float, help=f'stop after so long, with exit code {UNFINISHED}')
    parser.set_defaults(data_dir=None, images=None)
    return parser.parse_args(argv)


def earlier_folder(name: str, quick: bool, given: Path) -> Path:
    """The folder to continue, which must have something of this experiment."""
    stem = f'{QUICK if quick else ""}{name}'
    if given == NEWEST:
        found = sorted(OUTPUT.glob(f'{stem}-*'))
        if not found:
            raise InputError(f'nothing to continue: there is no {OUTPUT}/{stem}-*')
        return found[-1]
    if not occupied(given, stem):
        raise InputError(f'nothing to continue: {given} has no {stem}.csv and no runs')
    return given


def occupied(folder: Path, stem: str) -> bool:
    return (folder / f'{stem}.csv').exists() or (folder / 'runs').exists()


def choose_folder(name: str, args: argparse.Namespace) -> Path:
    """A folder of an earlier command only if asked for."""
    if args.earlier is not None:
        return earlier_folder(name, args.quick, args.earlier)
    if args.output is None:
        return fresh_folder(name, args.quick)
    if occupied(args.output, f'{QUICK if args.quick else ""}{name}'):
        raise InputError(f'{args.output} has results already: --continue {args.output}, or begin in another folder')
    return args.output


def make_runner(name: str, args: argparse.Namespace) -> Runner:
    """The runner of an experiment whose table has the name."""
    if args.data_dir and not Path(args.data_dir).is_dir():
        raise InputError(f'the data folder {args.data_dir} does not exist')
    folder = choose_folder(name, args)
    runs = OUTPUT / 'runs' if shipped(folder) else folder / 'runs'  # checkpoints do not belong into docs/
    return Runner(
        work=args.work or runs,
        report=Report(folder, args.quick),
        data_dir=args.data_dir,
        jobs=args.jobs or (1 if args.quick else 2),
        deadline=None if args.minutes is None else time.time() + 60 * args.minutes,
        images=args.images,
    )


def continuing_command(name: str, args: argparse.Namespace, folder: Path) -> str:
    """The command that continues."""
    words = ['python', '-m', f'experiments.{name}', '--continue', str(folder)]
    words += ['--quick'] if args.quick else []
    for option, value in (
        ('--images', args.images),
        ('--data-dir', args.data_dir),
        ('--work', args.work),
        ('--minutes', args.minutes),
    ):
        words += [option, f'{value:g}' if isinstance(value, float) else str(value)] if value is not None else []
    return shlex.join(words)


def main(
    name: str,
    about: str,
    experiment: Callable[[Runner], None],
    data: bool = True,
    argv: list[str] | None = None,
    images: Sequence[str] = (),
) -> int:
    """Run an experiment; the exit code tells whether it is to go on.

    Args:
        data: Whether it needs a folder of images.
        images: What `--images` takes, if there is a choice. Tables of all but the first have it in their name.
    """
    args = parse(name, about, data, argv, images)
    try:
        runner = make_runner(table_name(name, args.images, images), args)
        print(f'{"continuing in" if args.earlier is not None else "results go to"} {runner.report.folder}')
        experiment(runner)
    except Unfinished as left:
        print(f'{left}; go on with\n{continuing_command(name, args, runner.report.folder)}', file=sys.stderr)
        return UNFINISHED
    except InputError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


def table_name(name: str, chosen: str | None, images: Sequence[str]) -> str:
    return f'{name}_{chosen}' if chosen in images[1:] else name
