"""Draw images from a trained model of pixels, or complete the lower half of given ones.

python -m nprf_vit.sample --checkpoint output/digits_pixel/best.pt --num 16 --output samples.png
"""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from nprf_vit.config.schema import DEVICES
from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.image_file import decode, open_image, reading
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.distributed.process_group import process_group
from nprf_vit.engine.distributed.watchdog import Phase
from nprf_vit.engine.output.atomic_file import replace_file
from nprf_vit.models.pixel_generation import PixelDecoder

from .engine.model import build_model, load_exact
from .engine.tasks.pixel import PixelLikelihood
from .engine.tasks.registry import task_of
from .errors import Exit, InputError, NotSaved, RunError, exit_with
from .models.pixel import PixelTransformer, from_raster, to_raster
from .processes import print_any_name

TILE = 64  # pixels: smaller images are enlarged by a whole factor to about this
GAP = 2  # pixels between tiles
MAX_SHEET = Image.MAX_IMAGE_PIXELS  # of the whole picture: viewers refuse larger ones
SEEDS = range(-(2**63), 2**64)  # torch's generators take these


def load_model(checkpoint: str, use_ema: bool = True) -> PixelTransformer:
    """The model of a checkpoint with its averaged weights where it has them, ready for generation."""
    content = read_checkpoint(checkpoint)
    config = make_config(content['config'], origin=checkpoint)
    if task_of(config) is not PixelLikelihood:
        raise InputError(
            f'{checkpoint} is a model for {config.task}: drawing needs one of pixels, such as digits_pixel'
        )
    model = build_model(config, fresh=False, checkpoint=checkpoint)
    averaged = content.get('state_dict_ema') if use_ema else None
    load_exact(model, content['state_dict'] if averaged is None else averaged, checkpoint)
    return model.eval()


def choose(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> torch.Tensor:
    """Bytes (B,) from logits (B, V): the inverse of the distribution function at uniform (B,); the mode at 0."""
    logits = logits.double()
    if temperature == 0:
        return logits.argmax(-1)
    reached = (logits / temperature).softmax(-1).cumsum(-1)  # B, V
    reached = reached / reached[:, -1:]  # ends at 1, whatever the rounding
    return (reached <= uniform[:, None].to(reached)).sum(-1).clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def generate(
    model: PixelTransformer,
    num: int,
    temperature: float = 1.0,
    seed: int = 0,
    known: torch.Tensor | None = None,
    batch: int = 64,
    progress: bool = False,
    alive: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Draw images byte by byte from cached states.

    Args:
        model: The model; all its bytes must be modelled (`length` not shortened).
        num: Images to draw.
        temperature: Divides the logits; 0 takes the likeliest byte.
        seed: Seed of the one uniform number per byte, so that an image does not depend on the others of its batch.
        known: (num, t) first bytes of each image, in raster order.
        batch: Images drawn side by side.
        progress: Show a bar.
        alive: Called before each byte, for a watchdog.

    Returns:
        Images (num, C, H, W), int64.
    """
    total = math.prod(model.img_size) * model.in_chans
    if model.length != total:
        raise InputError(f'this model has {model.length} of the {total} bytes of an image: it cannot draw whole images')
    device = model.start_token.device
    uniform = torch.rand(num, total, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    raster = torch.zeros(num, total, dtype=torch.long, device=device)
    given = 0
    if known is not None:
        given = known.shape[1]
        raster[:, :given] = known.to(device)
    with tqdm(total=num * total, unit='byte', disable=not progress) as bar:
        for part in torch.arange(num).split(batch):
            decoder, rows = PixelDecoder(model, len(part)), raster[part]  # rows is a copy
            for t in range(total):
                alive()
                logits = decoder.step(rows[:, t - 1] if t else None)
                if t >= given:
                    rows[:, t] = choose(logits, temperature, uniform[part, t].to(device))
                bar.update(len(part))
            raster[part] = rows
    return from_raster(raster, model.in_chans, model.img_size)


def read_image(path: str, model: PixelTransformer) -> torch.Tensor:
    """An image file as levels (C, H, W); one of another size is refused before it is decoded."""
    if not Path(path).is_file():
        raise InputError(f'no image file {path}')
    height, width = model.img_size
    with reading(lambda: f'the image {path}'), open(path, 'rb') as stream:
        with open_image(stream) as image:
            size = image.size
        if size == (width, height):
            stream.seek(0)
            pixels = np.asarray(decode(stream, 'L' if model.in_chans == 1 else 'RGB', height * width))
    if size != (width, height):
        raise InputError(f'{path} is {size[0]}x{size[1]}, the model draws {width}x{height}')
    levels = np.rint(pixels.reshape(height, width, -1) * ((model.levels - 1) / 255)).astype(np.int64)
    return torch.from_numpy(levels).permute(2, 0, 1)


def draw_grid(images: torch.Tensor, levels: int, columns: int) -> Image.Image:
    """Images (N, C, H, W) in levels as one picture, row by row, small ones enlarged, with white lines between."""
    pixels = (images.cpu().double() * (255 / (levels - 1))).round().to(torch.uint8)
    factor = _enlargement(images.shape[2:])
    pixels = pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3).permute(0, 2, 3, 1).numpy()
    count, height, width, channels = pixels.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + GAP) + GAP, columns * (width + GAP) + GAP, channels), 255, np.uint8)
    for i, tile in enumerate(pixels):
        y, x = GAP + i // columns * (height + GAP), GAP + i % columns * (width + GAP)
        sheet[y : y + height, x : x + width] = tile
    return Image.fromarray(sheet[..., 0] if channels == 1 else sheet)


def _enlargement(size: Sequence[int]) -> int:
    return max(1, TILE // max(size))


def _check_sheet(model: PixelTransformer, args: argparse.Namespace) -> None:
    """Before hours of drawing, and before memory is taken for them."""
    height, width = (side * _enlargement(model.img_size) + GAP for side in model.img_size)
    count = (args.num + 1) * len(args.complete) if args.complete else args.num
    if count * height * width > MAX_SHEET:
        most = MAX_SHEET // (height * width)
        raise InputError(f'--num {args.num}: {count} images in one picture; it has room for {most} of this model')


def draw_samples(
    model: PixelTransformer, args: argparse.Namespace, alive: Callable[[], None] = lambda: None
) -> Image.Image:
    """A grid of new images; or a row per given image: itself, then its completions."""
    _check_sheet(model, args)
    options = {'temperature': args.temperature, 'seed': args.seed, 'batch': args.batch_size, 'progress': True}
    options['alive'] = alive
    if not args.complete:
        return draw_grid(generate(model, args.num, **options), model.levels, math.ceil(math.sqrt(args.num)))
    given = torch.stack([read_image(path, model) for path in args.complete])  # I, C, H, W
    upper = to_raster(given[:, :, : model.img_size[0] // 2]).repeat_interleave(args.num, 0)
    drawn = generate(model, len(upper), known=upper, **options).cpu().unflatten(0, (len(given), args.num))
    return draw_grid(torch.cat([given[:, None], drawn], dim=1).flatten(0, 1), model.levels, args.num + 1)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m nprf_vit.sample', description=__doc__.splitlines()[0])
    parser.add_argument('--checkpoint', required=True, metavar='FILE', help='last.pt or best.pt of a pixel model')
    parser.add_argument('--output', required=True, metavar='FILE', help='picture to write, such as samples.png')
    parser.add_argument('--num', type=int, default=16, help='images, or completions of each given one (default 16)')
    parser.add_argument('--temperature', type=float, default=1.0, help='1: the model; towards 0: its likeliest bytes')
    parser.add_argument('--seed', type=int, default=0, help='another seed, other images')
    parser.add_argument('--complete', nargs='+', metavar='IMAGE', help='keep the upper half of these images')
    parser.add_argument('--batch-size', type=int, default=64, help='images drawn side by side; changes none of them')
    parser.add_argument('--no-ema', action='store_true', help='the last weights instead of their moving average')
    parser.add_argument('--stall-timeout', type=float, default=1800, help='seconds for one byte before giving up')
    parser.add_argument('--device', default='cpu', choices=DEVICES, help='default cpu')
    return parser.parse_args(argv)


def _check(args: argparse.Namespace) -> None:
    for name, least in (('num', 1), ('batch_size', 1), ('temperature', 0), ('stall_timeout', 1)):
        if not getattr(args, name) >= least:
            option = name.replace('_', '-')
            raise InputError(f'--{option} {getattr(args, name)}: expected at least {least}')
    if args.seed not in SEEDS:
        raise InputError(f'--seed: expected a number from {SEEDS[0]} to {SEEDS[-1]}')
    output = Path(args.output)
    if not output.parent.is_dir() or output.is_dir() or output.suffix.lower() != '.png':
        raise InputError(f'--output {args.output}: expected a .png file in a folder that exists')


def _write(picture: Image.Image, path: Path) -> None:
    try:
        replace_file(path, lambda stream: picture.save(stream, 'PNG'))
    except OSError as error:
        raise NotSaved(f'cannot write {path}: {error.strerror or error}; the images are lost') from None
    with contextlib.suppress(OSError):  # nobody may listen any more
        print(f'wrote {path}, {picture.width}x{picture.height}', flush=True)


def main(argv: list[str] | None = None) -> int:
    """Returns one of `nprf_vit.exit_codes.Exit`."""
    args = parse(argv)
    print_any_name()
    try:
        _check(args)
        with process_group(args.device, stall_timeout=args.stall_timeout) as place:
            model = load_model(args.checkpoint, use_ema=not args.no_ema).to(place.device)
            picture = draw_samples(model, args, lambda: place.heartbeat.enter(Phase.FORWARD))
            _write(picture, Path(args.output))
    except (InputError, RunError) as error:
        return exit_with(error)
    return Exit.DONE


if __name__ == '__main__':
    sys.exit(main())
