"""What CIFAR-10 takes without a network, in bits per dimension: picture files without loss, a histogram per byte.

python -m experiments.codecs --data-dir DIR    a minute on one core; writes to a new folder in output/
python -m experiments.codecs --quick           on the embedded digits, or on DIR; writes nothing unless --output

Images of the test set, 500 of them below each other in a picture, so that a file's header does not count. The histogram
has the training set's counts. For comparison with `experiments.bits_per_dim --images cifar10`.
"""

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.report import Report, options
from experiments.cifar10_arrays import shrink
from experiments.histogram import bits_per_image
from nprf_vit.data.datasets.cifar10 import Cifar10
from nprf_vit.data.datasets.digits import Digits
from nprf_vit.errors import InputError

SIDES = (16, 32)
LEVELS = 256
TOGETHER = 500  # images in a file
# how Pillow is asked for small files without loss; WebP's quality of 100 takes 28 times as long for 0.02 bits less
FORMATS = {
    'PNG': {'format': 'PNG', 'optimize': True},
    'JPEG 2000': {'format': 'JPEG2000', 'irreversible': False},
    'WebP': {'format': 'WEBP', 'lossless': True, 'quality': 80, 'method': 6, 'exact': True},
}


def file_bits(images: np.ndarray, how: dict) -> float:
    """Bits per byte of the images (N, H, W, C) in files without loss."""
    size = 0
    for first in range(0, len(images), TOGETHER):
        stack = np.concatenate(images[first : first + TOGETHER])
        stream = io.BytesIO()
        Image.fromarray(stack).save(stream, **how)
        if not np.array_equal(np.asarray(Image.open(stream)), stack):
            raise InputError(f'{how["format"]} gave other pixels back')
        size += stream.tell()
    return 8 * size / images.size


def measure(train: np.ndarray, test: np.ndarray) -> list[dict]:
    """A row per way; RGB images of bytes."""
    found = {'histogram per byte': float(bits_per_image(train, test, LEVELS).mean())}
    found |= {name: file_bits(test, how) for name, how in FORMATS.items()}
    about = {'pixels': f'{test.shape[2]}x{test.shape[1]}', 'images': len(test)}
    return [{**about, 'way': name, 'bits_per_dim': f'{bits:.4f}'} for name, bits in found.items()]


def colour_digits(split: str) -> np.ndarray:
    grey = np.stack(Digits(split).levels).reshape(-1, 8, 8, 1).astype(np.uint8)
    return np.repeat(15 * grey, 3, -1)


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument('--data-dir', type=Path, help='folder that has cifar-10-batches-py in it')
    args = parser.parse_args(argv)
    if args.data_dir is None and not args.quick:
        parser.error('--data-dir is needed: the folder that has cifar-10-batches-py in it')
    try:
        report = Report.of(args, 'codecs')
        if args.data_dir is None:
            rows = measure(*map(colour_digits, ('train', 'validation')))
        else:
            full = [Cifar10(args.data_dir, split).images for split in ('train', 'test')]
            sides = SIDES[:1] if args.quick else SIDES
            rows = [row for side in sides for row in measure(*(shrink(images, side) for images in full))]
    except InputError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    report.table(rows)
    report.save({'codecs': rows})
    return 0


if __name__ == '__main__':
    sys.exit(main())
