"""Write a training run as a folder for the Hugging Face Hub: weights, config.json, a model card. Push it if asked.

python -m nprf_vit.hub output/NAME FOLDER                      timm.create_model('local-dir:FOLDER', pretrained=True)
python -m nprf_vit.hub output/NAME FOLDER --push USER/NAME     timm.create_model('hf-hub:USER/NAME', pretrained=True)
"""

import argparse
import contextlib
import sys
from pathlib import Path

from ..command import check_path, run_command
from ..engine.run_report.read_run import read_run
from ..errors import Exit, InputError, RunError, exit_with
from ..processes import print_any_name
from .folder import check_folder, write_folder
from .upload import check_repo, upload


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    doc = __doc__ or ''
    parser = argparse.ArgumentParser(
        prog='python -m nprf_vit.hub', description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('run', metavar='RUN', help='output folder of train.py')
    parser.add_argument('folder', metavar='FOLDER', help='to write: a new or an empty one')
    parser.add_argument('--checkpoint', metavar='FILE', help='default: best.pt of the run, or its model.safetensors')
    parser.add_argument('--ema', action='store_true', help='the moving average of the weights instead of the weights')
    parser.add_argument('--name', help="of the model in its card; default: the repository's, or FOLDER's")
    parser.add_argument('--license', default='apache-2.0', metavar='ID', help='of the weights; default apache-2.0')
    parser.add_argument('--push', metavar='USER/NAME', help='also upload it; `hf auth login` comes before that')
    parser.add_argument('--private', action='store_true', help='for --push: a repository that only you see')
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns one of `nprf_vit.exit_codes.Exit`."""
    args = parse(argv)
    print_any_name()
    try:
        for path, what in ((args.run, 'RUN'), (args.folder, 'FOLDER'), (args.checkpoint, '--checkpoint')):
            check_path(path, what)
        if args.push:
            check_repo(args.push)
        folder = Path(args.folder)
        check_folder(folder)
        name = args.name or (args.push or folder.resolve().name).split('/')[-1]
        run = read_run(Path(args.run))
        made = write_folder(run, folder, name, args.push, args.license, args.checkpoint, args.ema)
        where = upload(folder, args.push, args.private) if args.push else None
    except (InputError, RunError) as error:
        return exit_with(error)
    with contextlib.suppress(OSError):  # nobody may listen any more
        print(f'{made}\nwrote {folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}')
        print(*([f'pushed to {where}'] if where else []), 'load it with', sep='\n')
        source = f'hf-hub:{args.push}' if args.push else f'local-dir:{args.folder}'
        print(f"import timm, nprf_vit; timm.create_model('{source}', pretrained=True)", flush=True)
    return Exit.DONE


if __name__ == '__main__':
    sys.exit(run_command(main))
