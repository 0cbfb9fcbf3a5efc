"""CIFAR-10 at a smaller size for models of pixels: every pixel the mean of a square, in one file of arrays.

python -m experiments.cifar10_arrays DIR 16    writes DIR/cifar10_16px.npz from DIR/cifar-10-batches-py
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from nprf_vit.data.datasets.cifar10 import SIZE, Cifar10
from nprf_vit.engine.output.atomic_file import replace_file
from nprf_vit.errors import InputError


def shrink(images: np.ndarray, side: int) -> np.ndarray:
    """Images (N, H, W, C) of bytes to `side` pixels, a divisor of H = W: rounded means, halves to even."""
    factor = images.shape[1] // side
    squares = images.reshape(len(images), side, factor, side, factor, -1)
    return squares.mean((2, 4), dtype=np.float32).round().astype(np.uint8)


def arrays_file(side: int) -> str:
    return f'cifar10_{side}px.npz'


def make_arrays(root: Path, side: int) -> Path:
    """The file in the folder that has cifar-10-batches-py in it, written if it is not there yet."""
    if side < 1 or SIZE % side:
        raise InputError(f'CIFAR-10 at {side} pixels: expected a divisor of {SIZE}')
    path = root / arrays_file(side)
    if path.is_file():
        return path
    arrays = {f'x_{split}': shrink(Cifar10(root, split).images, side) for split in ('train', 'test')}
    replace_file(path, lambda stream: np.savez_compressed(stream, **arrays))
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', type=Path, metavar='DIR', help='folder that has cifar-10-batches-py in it')
    parser.add_argument('side', type=int, help='pixels, a divisor of 32')
    args = parser.parse_args(argv)
    try:
        path = make_arrays(args.root, args.side)
    except InputError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == '__main__':
    sys.exit(main())
