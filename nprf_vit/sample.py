"""Draw images from a trained model of pixels, or complete the lower half of given ones.

python -m nprf_vit.sample --checkpoint output/digits_pixel/best.pt --num 16 --output samples.png
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from .engine.checkpoint import read_checkpoint
from .engine.config_file import make_config
from .engine.distributed import choose_device
from .engine.model import build_model, load_exact
from .errors import InputError
from .models.decoder import PixelDecoder
from .models.pixel import PixelTransformer, from_raster, to_raster

TILE = 64  # pixels: smaller images are enlarged by a whole factor to about this


def load_model(checkpoint: str, use_ema: bool = True) -> PixelTransformer:
    """The model of a checkpoint with its averaged weights where it has them, ready for generation."""
    content = read_checkpoint(checkpoint)
    config = make_config(content['config'], origin=checkpoint)
    if config.task != 'pixel':
        raise InputError(
            f'{checkpoint} is a model for {config.task}: drawing needs one of pixels, such as digits_pixel'
        )
    model = build_model(config, fresh=False)
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

    Returns:
        Images (num, C, H, W), int64.
    """
    total = math.prod(model.img_size) * model.in_chans
    if model.length != total:
        raise InputError(f'this model has {model.length} of the {total} bytes of an image: it cannot draw whole images')
    device = model.start_token.device
    uniform = torch.rand(num, total, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    raster = torch.zeros(num, total, dtype=torch.long, device=device)
    given = 0 if known is None else known.shape[1]
    if given:
        raster[:, :given] = known.to(device)
    with tqdm(total=num * total, unit='byte', disable=not progress) as bar:
        for part in torch.arange(num).split(batch):
            decoder, rows = PixelDecoder(model, len(part)), raster[part]  # rows is a copy
            for t in range(total):
                logits = decoder.step(rows[:, t - 1] if t else None)
                if t >= given:
                    rows[:, t] = choose(logits, temperature, uniform[part, t].to(device))
                bar.update(len(part))
            raster[part] = rows
    return from_raster(raster, model.in_chans, model.img_size)


def read_image(path: str, model: PixelTransformer) -> torch.Tensor:
    """An image file as levels (C, H, W)."""
    if not Path(path).is_file():
        raise InputError(f'no image file {path}')
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert('L' if model.in_chans == 1 else 'RGB'))
    except OSError as error:
        raise InputError(f'cannot read the image {path}: {error}') from None
    height, width = model.img_size
    if pixels.shape[:2] != (height, width):
        raise InputError(f'{path} is {pixels.shape[1]}x{pixels.shape[0]}, the model draws {width}x{height}')
    levels = np.rint(pixels.reshape(height, width, -1) * ((model.levels - 1) / 255)).astype(np.int64)
    return torch.from_numpy(levels).permute(2, 0, 1)


def draw_grid(images: torch.Tensor, levels: int, columns: int) -> Image.Image:
    """Images (N, C, H, W) in levels as one picture, row by row, small ones enlarged, with white lines between."""
    pixels = (images.cpu().double() * (255 / (levels - 1))).round().to(torch.uint8)
    factor = max(1, TILE // max(images.shape[2:]))
    pixels = pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3).permute(0, 2, 3, 1).numpy()
    count, height, width, channels = pixels.shape
    rows, gap = -(-count // columns), 2
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 255, np.uint8)
    for i, tile in enumerate(pixels):
        y, x = gap + i // columns * (height + gap), gap + i % columns * (width + gap)
        sheet[y : y + height, x : x + width] = tile
    return Image.fromarray(sheet[..., 0] if channels == 1 else sheet)


def draw_samples(model: PixelTransformer, args: argparse.Namespace) -> Image.Image:
    """A grid of new images; or a row per given image: itself, then its completions."""
    options = {'temperature': args.temperature, 'seed': args.seed, 'batch': args.batch_size, 'progress': True}
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
    parser.add_argument('--device', default='cpu', choices=('cpu', 'cuda'), help='default cpu')
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        for name, least in (('num', 1), ('batch_size', 1), ('temperature', 0)):
            if not getattr(args, name) >= least:
                option = name.replace('_', '-')
                raise InputError(f'--{option} {getattr(args, name)}: expected at least {least}')
        if not Path(args.output).parent.is_dir() or Path(args.output).suffix.lower() != '.png':
            raise InputError(f'--output {args.output}: expected a .png file in a folder that exists')
        model = load_model(args.checkpoint, use_ema=not args.no_ema).to(choose_device(args.device))
        picture = draw_samples(model, args)
    except InputError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    picture.save(args.output)
    print(f'wrote {args.output}, {picture.width}x{picture.height}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
