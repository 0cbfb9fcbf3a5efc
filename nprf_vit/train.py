"""Train a model from a YAML file: nprf-train --config FILE (in a checkout: python train.py; under torchrun as well)."""

import argparse
import sys
from pathlib import Path

from .command import check_path, run_command
from .config.reference import as_help
from .config.yaml_file import load_config, override
from .engine.distributed.process_group import process_group
from .engine.dry_run.run import dry_run
from .engine.preemption import Preemption
from .engine.train import train
from .errors import Exit, InputError, RunError, exit_with
from .processes import print_any_name


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=as_help(), formatter_class=layout)
    parser.add_argument('--config', required=True, metavar='FILE', help='YAML file of the run')
    parser.add_argument('--data-dir', metavar='DIR', help='data folder, where the dataset needs one')
    parser.add_argument('--output', metavar='DIR', help='output folder (default: output/NAME-OF-CONFIG)')
    parser.add_argument(
        '--resume', metavar='auto|FILE', help="continue: 'auto' takes the newest good checkpoint of the output folder"
    )
    parser.add_argument(
        '--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE', help='override keys, listed below'
    )
    parser.add_argument('--dry-run', action='store_true', help='a few steps on synthetic images: memory, speed, days')
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns one of `nprf_vit.exit_codes.Exit`."""
    args = parse(argv)
    print_any_name()
    try:
        for name in ('config', 'data_dir', 'output', 'resume'):
            check_path(getattr(args, name), '--' + name.replace('_', '-'))
        config = load_config(args.config, args.set)
        if args.data_dir:
            config = override(config, data_dir=args.data_dir)
        folder = Path(args.output or Path('output') / Path(args.config).stem)
        for name in ('data_dir', 'initial_checkpoint', 'real_labels'):
            check_path(getattr(config, name), name)
        with process_group(config.device, config.threads, config.stall_timeout) as place, Preemption() as preempted:
            if args.dry_run:
                dry_run(config, place)
            elif train(config, place, folder, args.resume, preempted) is None:
                return Exit.PREEMPTED
    except (InputError, RunError) as error:
        return exit_with(error)
    return Exit.DONE


def run() -> int:
    """The console script `nprf-train`."""
    return run_command(main)


if __name__ == '__main__':
    sys.exit(run())
