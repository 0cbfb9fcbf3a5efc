"""Downsampled ImageNet at 32×32 in its two versions, which differ in images and resampling and are not comparable.

chrabaszcz: Chrabaszcz, Loshchilov and Hutter, arXiv 1707.08819. Ten training batches and one of validation, as pickles
    or npz, with `data` N×3072 (all red bytes of an image, then all green, then all blue) and `labels` from 1 to 1000.
vandenoord: van den Oord, Kalchbrenner and Kavukcuoglu, arXiv 1601.06759. PNG files without labels, a tar or a folder.
"""

import io
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from nprf_vit.data.image_file import check_regular, decode, reading
from nprf_vit.errors import BadImage, InputError, first_line

from .npz import read_npz
from .plain_pickle import read_pickle
from .tars import check_end, reading_tar

SIZE, CHANNELS, CLASSES = 32, 3, 1000
ROW = SIZE * SIZE * CHANNELS
_BATCHES = {'train': [f'train_data_batch_{i}' for i in range(1, 11)], 'validation': ['val_data']}
_FOLDERS = {'train': 'train_32x32', 'validation': 'valid_32x32'}
MAX_NAME, MAX_PNG = 255, 2**20  # characters; bytes, 300 times what the pixels need
_PNG = b'\x89PNG\r\n\x1a\n'


class BatchImages:
    """The images of a split by index, all in memory as their files have them: 3.9 GB for training."""

    def __init__(self, root: Path, split: str) -> None:
        self.parts = [_read_batch(path) for path in _find_batches(root, split)]
        self.ends = np.cumsum([len(part) for part in self.parts])
        self.shape = (int(self.ends[-1]), SIZE, SIZE, CHANNELS)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> np.ndarray:
        """(32, 32, 3) uint8."""
        part = int(np.searchsorted(self.ends, index, side='right'))
        return self.parts[part][index - int(self.ends[part])]  # from the part's end, hence negative


def _find_batches(root: Path, split: str) -> list[Path]:
    """The split's files in their order, all pickles or all npz, in `root` or in one folder below it."""
    names = _BATCHES[split]
    found: dict[tuple[str, str], Path] = {}
    for folder in (root, *sorted(p for p in root.iterdir() if p.is_dir())):
        for name in names:
            for path in (folder / name, folder / f'{name}.npz'):
                if path.is_file():
                    found.setdefault((name, path.suffix), path)
    kinds = {suffix for _, suffix in found}
    if len(kinds) > 1:
        pickles, arrays = ([name for name, s in sorted(found) if s == suffix] for suffix in ('', '.npz'))
        raise InputError(
            f'{root} mixes pickles ({", ".join(pickles[:3])}) and npz files ({", ".join(arrays[:3])}) of ImageNet32: '
            'keep one kind'
        )
    suffix = kinds.pop() if kinds else ''
    missing = [name + suffix for name in names if (name, suffix) not in found]
    if missing:
        raise InputError(
            f'{root} lacks {", ".join(missing)} of ImageNet32 (chrabaszcz, {split}): expected {names[0]}'
            f'{f" to {names[-1]}" if len(names) > 1 else ""}, as pickles or .npz, there or in one folder below'
        )
    return [found[name, suffix] for name in names]


def _read_batch(path: Path) -> np.ndarray:
    content = read_npz(path, ('data', 'labels')) if path.suffix == '.npz' else read_pickle(path)
    if not isinstance(content, dict) or not {'data', 'labels'} <= content.keys():
        raise InputError(f'{path} is no ImageNet32 batch: expected a dict with data and labels')
    data = content['data']
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != ROW or data.dtype != np.uint8:
        got = f'{data.dtype} {data.shape}' if isinstance(data, np.ndarray) else type(data).__name__
        raise InputError(f'data in {path} is {got}: expected uint8 rows of {ROW} bytes (32x32 red, green, blue)')
    _check_labels(content['labels'], len(data), path)
    return data.reshape(-1, CHANNELS, SIZE, SIZE).transpose(0, 2, 3, 1)


def _check_labels(labels: Any, count: int, path: Path) -> None:
    """Labels are not used, but wrong ones mean that the file is another one than it seems."""
    if type(labels) is list and all(type(label) is int for label in labels):
        shape: tuple[int, ...] = (len(labels),)
    elif isinstance(labels, np.ndarray) and labels.dtype.kind in 'iu':
        shape, labels = labels.shape, labels.reshape(-1).tolist()
    else:  # not converted by numpy, which would unfold lists that hold each other
        got = str(labels.dtype) if isinstance(labels, np.ndarray) else type(labels).__name__
        raise InputError(f'labels in {path} are {got}: expected {count} integers')
    if shape != (count,):
        raise InputError(f'labels in {path} are integers of shape {shape}: expected {count} integers')
    if count and (min(labels) < 1 or max(labels) > CLASSES):
        low, high = max(min(labels), -(2**63)), min(max(labels), 2**63)  # thousands of digits cannot be printed
        raise InputError(f'labels in {path} lie in {low}..{high}: expected 1..{CLASSES}')


class PngImages:
    """The PNG files of a split by index, in the order of their names, from a folder or straight from a tar.

    Opening reads the header of every file: sizes and colours are checked once, for all of them.
    """

    def __init__(self, root: Path, split: str) -> None:
        name = _FOLDERS[split]
        folder, archive = root / name, root / f'{name}.tar'
        if folder.is_dir():
            self.path, entries = folder, _list_folder(folder)
        elif archive.is_file():
            self.path, entries = archive, _list_tar(archive)
        else:
            raise InputError(f'{root} has neither {name}.tar nor a folder {name} of ImageNet32 (vandenoord, {split})')
        entries.sort()
        self.names = np.array([entry[0] for entry in entries])
        self.places = np.array([entry[1:] for entry in entries], dtype=np.int64).reshape(-1, 2)  # offset, bytes
        self.shape = (len(entries), SIZE, SIZE, CHANNELS)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> np.ndarray:
        """(32, 32, 3) uint8. Opens the file each time: workers that share a handle would share its position."""
        offset, size = (int(v) for v in self.places[index])
        path = self.path / self.names[index] if self.path.is_dir() else self.path
        with reading(lambda: f'{self.names[index]} of {self.path}'):
            check_regular(str(path))
            with open(path, 'rb') as stream:
                stream.seek(offset)
                content = stream.read(size)
            pixels = np.asarray(decode(io.BytesIO(content), 'RGB', SIZE * SIZE))
            if pixels.shape != self.shape[1:]:
                raise BadImage(f'{pixels.shape[1]}x{pixels.shape[0]} pixels')
        return pixels


def _list_folder(folder: Path) -> list[tuple[str, int, int]]:
    entries = []
    for path in folder.rglob('*.png'):
        try:
            check_regular(str(path))  # opening a pipe would wait for ever
            with open(path, 'rb') as stream:
                _check_header(stream.read(26), str(path))
            entries.append((path.relative_to(folder).as_posix(), 0, _check_size(path.stat().st_size, str(path))))
        except (OSError, BadImage) as error:
            raise InputError(f'cannot read {path}: {first_line(error)}') from None
    return entries


def _list_tar(archive: Path) -> list[tuple[str, int, int]]:
    entries = []
    with reading_tar(archive), tarfile.open(archive, 'r:') as tar, open(archive, 'rb') as stream:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # tarfile would keep a million of them
            if not member.isfile() or not member.name.endswith('.png'):
                continue
            name = f'{member.name[-80:]} in {archive}'
            if member.issparse():
                raise InputError(f'{name} has holes, and may claim any size')
            if len(Path(member.name).name) > MAX_NAME:
                raise InputError(f'{name} has a name of {len(member.name)} characters')
            stream.seek(member.offset_data)
            _check_header(stream.read(26), name)
            entries.append((Path(member.name).name, member.offset_data, _check_size(member.size, name)))
        check_end(stream, tar.offset)
    return entries


def _check_size(size: int, name: str) -> int:
    if size > MAX_PNG:
        raise InputError(f'{name} has {size} bytes: expected a PNG file of {SIZE}x{SIZE} pixels')
    return size


def _check_header(header: bytes, name: str) -> None:
    """Size, depth and colour type stand at fixed places of every PNG file."""
    if len(header) < 26 or header[:8] != _PNG:
        raise InputError(f'{name} is no PNG file')
    width, height, depth, colour = struct.unpack('>IIBB', header[16:26])
    if (width, height) != (SIZE, SIZE):
        raise InputError(f'{name} is {width}x{height}: expected {SIZE}x{SIZE}')
    if (depth, colour) != (8, 2):
        raise InputError(f'{name} has {depth} bits and colour type {colour}: expected 8-bit RGB (type 2)')
