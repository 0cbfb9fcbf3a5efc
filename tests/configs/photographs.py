"""A folder in ImageNet's layout, cut from real photographs.

python -m tests.configs.photographs OUT
python -m tests.configs.photographs OUT --photographs /usr/share/backgrounds --classes 24 --train 40 --val 10

Without --photographs the two that scikit-learn ships are cut up. Folders of photographs come for instance with Debian's
packages mate-backgrounds, lomiri-wallpapers-16.04, lomiri-wallpapers-20.04, ukui-wallpapers and opencv-doc.
"""

import argparse
import random
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_images

SIDES = 48, 480  # of the pieces, in pixels; most of ImageNet's images have sides of 300 to 500
SUFFIXES = {'.jpg', '.jpeg', '.webp'}


def photographs(folders: list[Path], side: int = 400) -> list[Image.Image]:
    """All photographs below `folders` whose sides have at least `side` pixels; without folders scikit-learn's two."""
    if not folders:
        return [Image.fromarray(pixels) for pixels in load_sample_images().images]
    found = []
    for path in sorted(path for folder in folders for path in folder.rglob('*') if path.suffix.lower() in SUFFIXES):
        with Image.open(path) as image:
            if min(image.size) >= side:
                image.thumbnail((1600, 1600))
                found.append(image.convert('RGB'))
    return found


def piece(image: Image.Image, area: tuple[float, float, float, float], rng: random.Random) -> Image.Image:
    """A random rectangle inside `area`, which is (left, top, right, bottom) in parts of the image."""
    (width, height), (left, top, right, bottom) = image.size, area
    left, right, top, bottom = (round(x) for x in (left * width, right * width, top * height, bottom * height))
    w, h = (rng.randint(min(SIDES[0], most), min(SIDES[1], most)) for most in (right - left, bottom - top))
    x, y = rng.randint(left, right - w), rng.randint(top, bottom - h)
    return image.crop((x, y, x + w, y + h))


def save(image: Image.Image, path: Path, number: int) -> None:
    """As a JPEG, or as one of the oddities that ImageNet has: greys, CMYK, a PNG by the name of a JPEG."""
    if number % 20 == 7:
        image = image.convert('L')
    elif number % 50 == 13:
        image = image.convert('CMYK')
    image.save(path, 'PNG' if number % 50 == 31 else 'JPEG')


def photograph_folder(
    root: Path, folders: list[Path] | None = None, classes: int = 1000, train: int = 2, val: int = 1, seed: int = 0
) -> Path:
    """Write ROOT/train/nXXXXXXXX/*.JPEG and ROOT/val/nXXXXXXXX/*.JPEG with so many images per class.

    A class is a photograph or, where there are more classes than photographs, a horizontal strip of one. Validation has
    its right fourth to itself, so no pixel is in both splits.
    """
    images, rng, number = photographs(folders or []), random.Random(seed), 0
    strips = min(-(-classes // len(images)), 6)  # beyond 6 strips classes share them: their labels mean nothing then
    for label in range(classes):
        image, strip = images[label % len(images)], label // len(images) % strips
        for split, count, (left, right) in (('train', train, (0, 0.75)), ('val', val, (0.75, 1))):
            folder = root / split / f'n{label:08d}'
            folder.mkdir(parents=True)
            for k in range(count):
                area = left, strip / strips, right, (strip + 1) / strips
                save(piece(image, area, rng), folder / f'{folder.name}_{k}.JPEG', number)
                number += 1
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out', type=Path)
    parser.add_argument('--photographs', type=Path, nargs='*', default=[], metavar='DIR')
    parser.add_argument('--classes', type=int, default=1000)
    parser.add_argument('--train', type=int, default=2, help='images per class')
    parser.add_argument('--val', type=int, default=1, help='images per class')
    args = parser.parse_args()
    root = photograph_folder(args.out, args.photographs, args.classes, args.train, args.val)
    print(f'{args.classes} classes, {args.classes * args.train} images for training, in {root}')


if __name__ == '__main__':
    main()
