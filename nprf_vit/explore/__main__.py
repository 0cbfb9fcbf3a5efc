"""Write one HTML file that shows where a model looks: attention of every head, learned biases, predictions.

python -m nprf_vit.explore --checkpoint output/NAME/best.pt --image photo.jpg --output explore.html
"""

import argparse
import contextlib
import sys

from nprf_vit.command import check_path, run_command
from nprf_vit.config.yaml_file import override
from nprf_vit.engine.output.result_file import ResultFile
from nprf_vit.errors import Exit, InputError, NotSaved, RunError, exit_with
from nprf_vit.html_page.build import size_of
from nprf_vit.layers import KERNELS
from nprf_vit.processes import print_any_name
from nprf_vit.sample import read_image

from .loading import Loaded, Wanted, at_size, load, twin
from .page import explore_page
from .pictures import Picture, pictures_of_data, read_pictures

IMAGES = 4  # of the checkpoint's own data, where no others are given
MOST_TOKENS = 1024  # up to which twice the size is shown without being asked for


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    doc = __doc__ or ''
    parser = argparse.ArgumentParser(prog='python -m nprf_vit.explore', description=doc.splitlines()[0])
    parser.add_argument('--checkpoint', required=True, metavar='FILE', help='last.pt, best.pt, or published weights')
    parser.add_argument('--image', nargs='+', action='extend', default=[], metavar='FILE', help='images to show')
    parser.add_argument('--output', default='explore.html', metavar='FILE', help='default explore.html')
    what = 'sizes side by side; with one, the own size beside it (default: the own and twice that)'
    parser.add_argument('--img-size', nargs='+', type=int, default=[], metavar='N', help=what)
    parser.add_argument('--model', metavar='NAME', help="of timm's registry, if the checkpoint does not tell its model")
    parser.add_argument('--config', metavar='FILE', help='YAML file of the model (default: the one beside the weights)')
    other = parser.add_mutually_exclusive_group()
    other.add_argument('--compare', metavar='FILE', help='a second checkpoint, shown beside the first')
    other.add_argument('--convert', choices=KERNELS, help='beside the model, its twin with this attention kernel')
    parser.add_argument('--feature-dim', type=int, default=64, help='random features of that twin (default 64)')
    parser.add_argument('--data-dir', metavar='DIR', help="the checkpoint's own data, to take images from")
    parser.add_argument('--no-ema', action='store_true', help='the last weights instead of their moving average')
    parser.add_argument('--megabytes', type=float, default=4.0, help='about what the page may take (default 4)')
    parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE', help='override keys')
    return parser.parse_args(argv)


def _check(args: argparse.Namespace) -> None:
    for name in ('checkpoint', 'output', 'config', 'compare', 'data_dir'):
        check_path(getattr(args, name), '--' + name.replace('_', '-'))
    for path in args.image:
        check_path(path, '--image')
    if not 0.1 <= args.megabytes <= 1000:
        raise InputError(f'--megabytes {args.megabytes}: expected 0.1 to 1000')
    if not 1 <= args.feature_dim <= 65536:
        raise InputError(f'--feature-dim {args.feature_dim}: expected 1 to 65536')
    for size in args.img_size:
        if not 1 <= size <= 16384:
            raise InputError(f'--img-size {size}: expected 1 to 16384')


def _models(args: argparse.Namespace) -> list[Loaded]:
    first = load(Wanted(args.checkpoint, args.model, args.config, args.set, not args.no_ema))
    models = [first]
    if args.compare:
        models.append(load(Wanted(args.compare, overrides=args.set, use_ema=not args.no_ema)))
        if models[1].is_pixel != first.is_pixel:
            raise InputError(f'--compare {args.compare}: a model of pixels and one of classes share no image')
    elif args.convert:
        models.append(twin(first, args.convert, args.feature_dim))
    if args.data_dir:
        for one in models:
            one.config = override(one.config, data_dir=args.data_dir)
    return models


def _sizes(args: argparse.Namespace, models: list[Loaded]) -> list[list[Loaded]]:
    """Each model at each size; two of them side by side are enough to begin with."""
    own = models[0].img_size
    if models[0].is_pixel:
        for size in args.img_size:
            at_size(models[0], size)  # refuses all but the model's own
        return [[one] for one in models]
    if len(args.img_size) > 1:
        sizes = [(size, size) for size in args.img_size]
    elif args.img_size:
        sizes = [own, (args.img_size[0],) * 2]
    else:
        twice = (2 * own[0], 2 * own[1])
        patch = models[0].model.patch_embed.patch_size
        few = (twice[0] // patch[0]) * (twice[1] // patch[1]) <= MOST_TOKENS
        fits = few and len(models) == 1 and hasattr(models[0].model, 'set_input_size')
        sizes = [own, twice] if fits else [own]
    return [[at_size(one, size) for size in dict.fromkeys(sizes)] for one in models]


def _pictures(args: argparse.Namespace, loaded: Loaded) -> list[Picture]:
    if not args.image:
        return pictures_of_data(loaded.config, IMAGES)
    if loaded.is_pixel:
        return [Picture(path, read_image(path, loaded.model)) for path in args.image]
    return read_pictures(args.image, loaded.config)


def main(argv: list[str] | None = None) -> int:
    """Returns one of `nprf_vit.exit_codes.Exit`."""
    args = parse(argv)
    print_any_name()
    try:
        _check(args)
        output = ResultFile(args.output, '--output')
        models = _models(args)
        page = explore_page(models, _sizes(args, models), _pictures(args, models[0]), args.megabytes)
        try:
            output.write(page)
        except OSError as error:
            raise NotSaved(f'cannot write {args.output}: {error.strerror or error}') from None
    except (InputError, RunError) as error:
        return exit_with(error)
    with contextlib.suppress(OSError):  # nobody may listen any more
        print(f'wrote {args.output}, {size_of(page)}; open it in a browser', flush=True)
    return Exit.DONE


if __name__ == '__main__':
    sys.exit(run_command(main))
