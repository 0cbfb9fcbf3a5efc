"""List the models of this package: parameters, multiply-adds and memory at a given image size. Nothing is computed.

python -m nprf_vit.list --img-size 1024 --filter 'nprf_deit_*'
"""

import argparse
import contextlib
import fnmatch
import sys
from collections.abc import Sequence

import timm
from tqdm import tqdm

from .command import run_command
from .engine.model_cost import CannotCount, ModelCost, count_model
from .errors import Exit, InputError, RunError, exit_with
from .processes import print_any_name
from .terminal import coloured, is_terminal

COLUMNS = ('model', 'image', 'parameters', 'GMACs', 'forward', 'update')
LARGEST = 16_384  # pixels a side, as in a configuration


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    doc = __doc__ or ''
    parser = argparse.ArgumentParser(prog='python -m nprf_vit.list', description=doc.splitlines()[0])
    parser.add_argument(
        '--img-size',
        type=int,
        nargs='+',
        metavar='N',
        help="side in pixels, or height and width; default each model's own",
    )
    parser.add_argument(
        '--filter', nargs='+', default=['*'], metavar='PATTERN', help="names, as in 'nprf_deit_*'; default all"
    )
    parser.add_argument('--timm', action='store_true', help='models of timm as well, where --filter names them')
    parser.add_argument(
        '--batch-size', type=int, default=1, metavar='N', help='images of which memory is counted; default 1'
    )
    parser.add_argument('--train', action='store_true', help='the memory of an update with AdamW as well; takes longer')
    return parser.parse_args(argv)


def find_models(patterns: Sequence[str], with_timm: bool) -> list[str]:
    """Names that match one of the patterns; timm's own only where asked for."""
    if with_timm and '*' in patterns:
        raise InputError("--timm lists what --filter names: give it a pattern, such as --filter 'deit_*'")
    names = timm.list_models()
    if not with_timm:
        names = [name for name in names if timm.model_entrypoint(name).__module__.startswith('nprf_vit.')]
    found = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not found:
        hint = (
            'without --filter all are listed'
            if with_timm
            else "--timm adds timm's, without --filter all of ours are listed"
        )
        raise InputError(f'--filter {" ".join(patterns)}: no model of that name; {hint}')
    return found


def check_size(sides: Sequence[int] | None) -> tuple[int, int] | None:
    if sides is None:
        return None
    if len(sides) > 2 or not all(1 <= side <= LARGEST for side in sides):
        given = ' '.join(map(str, sides))
        raise InputError(f'--img-size {given}: expected one or two numbers from 1 to {LARGEST:,}')
    return sides[0], sides[-1]


def cells(cost: ModelCost) -> tuple[str, ...]:
    """What is printed of a model; the last one where an update was counted."""
    size = 'x'.join(map(str, cost.img_size))
    numbers = f'{cost.parameters / 1e6:,.2f} M', f'{cost.macs / 1e9:,.2f}', f'{cost.forward_bytes / 1e6:,.0f} MB'
    update = () if cost.update_bytes is None else (f'{cost.update_bytes / 1e6:,.0f} MB',)
    return cost.name, size, *numbers, *update


def as_table(costs: dict[str, ModelCost | str]) -> str:
    """Names to the left, numbers to the right; for a model that could not be counted, why."""
    counted = {name: cells(cost) for name, cost in costs.items() if isinstance(cost, ModelCost)}
    header = COLUMNS[: max([len(line) for line in counted.values()], default=5)]
    widths = [max(map(len, column)) for column in zip(header, *counted.values())]
    widths[0] = max(map(len, [header[0], *costs]))

    def joined(line: tuple[str, ...]) -> str:
        return '  '.join(
            [f'{line[0]:<{widths[0]}}', *(f'{text:>{width}}' for text, width in zip(line[1:], widths[1:]))]
        )

    lines = [coloured(joined(header), sys.stdout, 'bold')]
    for name, cost in costs.items():
        lines.append(joined(counted[name]) if name in counted else f'{name:<{widths[0]}}  not counted: {cost}')
    return '\n'.join(lines)


def main(argv: list[str] | None = None) -> int:
    """Returns one of `nprf_vit.exit_codes.Exit`."""
    args = parse(argv)
    print_any_name()
    try:
        size = check_size(args.img_size)
        if args.batch_size < 1:
            raise InputError(f'--batch-size {args.batch_size}: expected at least 1')
        names = find_models(args.filter, args.timm)
        costs: dict[str, ModelCost | str] = {}
        for name in tqdm(names, leave=False, disable=not is_terminal(sys.stderr)):
            try:
                costs[name] = count_model(name, size, args.batch_size, args.train)
            except CannotCount as error:
                costs[name] = str(error)
    except (InputError, RunError) as error:
        return exit_with(error)
    images = 'an image' if args.batch_size == 1 else f'{args.batch_size} images'
    update = ', and of an update with AdamW' if args.train else ''
    with contextlib.suppress(OSError):  # nobody may listen any more
        print(as_table(costs))
        print(
            f'\nGMACs of an image. Memory of a forward pass of {images} in float32{update}, weights included.',
            flush=True,
        )
    return Exit.DONE if any(isinstance(cost, ModelCost) for cost in costs.values()) else Exit.INPUT


if __name__ == '__main__':
    sys.exit(run_command(main))
