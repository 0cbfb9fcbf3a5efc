"""Evaluate a model: nprf-validate --config FILE --checkpoint FILE (in a checkout: python validate.py)."""

import argparse
import sys

from .command import check_path, run_command
from .config.yaml_file import load_config, make_config, override
from .engine.distributed.process_group import process_group
from .engine.validate import validate
from .errors import Exit, InputError, RunError, exit_with
from .processes import print_any_name


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument('--config', metavar='FILE', help='YAML file of the run')
    what.add_argument(
        '--model', metavar='NAME', help="a model of timm's registry; without a checkpoint, its own weights"
    )
    parser.add_argument(
        '--checkpoint', metavar='FILE', help='weights: last.pt, best.pt, or any state dict of the model'
    )
    parser.add_argument('--data-dir', metavar='DIR', help='data folder, where the dataset needs one')
    parser.add_argument('--json', metavar='FILE', help='write the results here too')
    keys = 'override keys, which train.py --help and docs/configuration.md list'
    parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE', help=keys)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print_any_name()
    try:
        for name in ('config', 'checkpoint', 'data_dir', 'json'):
            check_path(getattr(args, name), '--' + name.replace('_', '-'))
        if args.config:
            config = load_config(args.config, args.set)
        else:
            config = make_config({'model': args.model, 'pretrained': args.checkpoint is None}, args.set)
        if args.data_dir:
            config = override(config, data_dir=args.data_dir)
        for name in ('data_dir', 'initial_checkpoint', 'real_labels'):
            check_path(getattr(config, name), name)
        with process_group(config.device, config.threads, config.stall_timeout) as place:
            validate(config, place, args.checkpoint, args.json)
    except (InputError, RunError) as error:
        return exit_with(error)
    return Exit.DONE


def run() -> int:
    """The console script `nprf-validate`."""
    return run_command(main)


if __name__ == '__main__':
    sys.exit(run())
