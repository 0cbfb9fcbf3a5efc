"""The usual mistakes in an ImageNet-style folder, each with its own message."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from timm.data.dataset import ImageDataset
from timm.data.readers.img_extensions import get_img_extensions
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.utils.misc import natural_key

from nprf_vit.errors import InputError, printable

from .tars import open_tar

MAX_DEPTH, MAX_VISITS = 64, 64  # levels of folders; times that one folder may be reached by links

_SPLIT_FOLDERS = {'train': ('train', 'training'), 'validation': ('validation', 'val', 'valid', 'eval', 'evaluation')}


def split_folder(root: Path, split: str) -> Path:
    """The folder or tar of a split under `root`, under any of the names that timm knows for it."""
    known = next((names for names in _SPLIT_FOLDERS.values() if split in names), (split,))
    for name in (split, *known):
        for candidate in (root / name, root / f'{name}.tar'):
            if candidate.exists():
                return candidate
    if root.is_file():
        return root
    listing = sorted(entry.name for entry in root.iterdir())[:8]
    raise InputError(
        f'{root} has no folder {" or ".join(known)} for the split {split}: expected {root}/{known[0]}/CLASS/IMAGE; '
        f'found {", ".join(listing) if listing else "an empty folder"}'
    )


def open_folder(root: str, split: str, mode: str) -> ImageDataset:
    """An ImageFolder (or tar) as timm reads it, checked: no flat folder, no empty class, at least one image."""
    base = Path(root)
    try:
        if not base.exists():
            raise InputError(f'the data folder {root} does not exist')
        path = split_folder(base, split)
        if path.is_file() and path.suffix == '.tar':
            reader: Reader = open_tar(path)
        else:
            reader = FolderReader(path)
            _check_classes(path, reader)
    except OSError as error:
        raise InputError(f'cannot read the data folder {root}: {printable(str(error))}') from error
    return ImageDataset(str(path), reader=reader, input_img_mode=mode)


class FolderReader(ReaderImageFolder):
    """timm's reader of class folders, safe from links that form a cycle."""

    def __init__(self, root: Path) -> None:
        Reader.__init__(self)
        self.root = str(root)
        types = get_img_extensions(as_set=True)
        found = [name for name in _walk(self.root) if os.path.splitext(name)[1].lower() in types]
        if not found:
            raise InputError(f'{root} holds no images: expected {root}/CLASS/IMAGE with {", ".join(sorted(types))}')
        labels = [
            '' if os.path.dirname(name) == self.root else os.path.basename(os.path.dirname(name)) for name in found
        ]
        try:
            self.class_to_idx = {label: i for i, label in enumerate(sorted(set(labels), key=natural_key))}
            pairs = [(name, self.class_to_idx[label]) for name, label in zip(found, labels)]
            self.samples = sorted(pairs, key=lambda pair: natural_key(pair[0]))
        except ValueError as error:  # superscripts, which are digits and no numbers
            raise InputError(f'cannot order the names in {root}: {error}') from None


def _walk(folder: str, above: tuple[tuple[int, int], ...] = (), visits: Counter | None = None) -> Iterator[str]:
    """All files below a folder, those of subfolders first, links followed.

    A link to a folder above its own would be followed for ever, and folders that link to each other twice multiply.
    """
    visits = Counter() if visits is None else visits
    try:
        status = os.stat(folder)
        identity = status.st_dev, status.st_ino
        visits[identity] += 1
        if identity in above:
            raise InputError(f'{printable(folder)} is a link to a folder that it lies in: its images would never end')
        if visits[identity] > MAX_VISITS or len(above) > MAX_DEPTH:
            raise InputError(f'{printable(folder)}: folders nested by links or deeper than {MAX_DEPTH} levels')
        with os.scandir(folder) as entries:
            found = [(entry.path, _is_folder(entry)) for entry in entries]
    except OSError as error:
        raise InputError(f'cannot list {printable(folder)}: {error.strerror}') from None
    for path, is_folder in found:
        if is_folder:
            yield from _walk(path, (*above, identity), visits)
    yield from (path for path, is_folder in found if not is_folder)


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: no image either, as will be told when it is read
        return False


def _check_classes(path: Path, reader: ReaderImageFolder) -> None:
    if '' in reader.class_to_idx:
        loose = sum(Path(name).parent == path for name, _ in reader.samples)
        raise InputError(
            f'{path} is flat: {loose} images lie directly in it. Each image belongs in a folder named after its '
            f'class, as in {path}/n01440764/IMAGE.JPEG (the ImageNet validation archive comes flat and must be sorted)'
        )
    folders = {entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith('.')}
    filled = {Path(name).relative_to(path).parts[0] for name, _ in reader.samples}
    empty = sorted(folders - filled)
    if empty:
        raise InputError(f'{len(empty)} class folders in {path} hold no images, the first: {", ".join(empty[:5])}')


def check_same_classes(train: ImageDataset, val: ImageDataset) -> None:
    """Class numbers come from sorted folder names, so one missing folder would shift every label after it."""
    a, b = (getattr(d.reader, 'class_to_idx', None) for d in (train, val))
    if a is None or b is None or a == b:
        return
    only_train, only_val = sorted(set(a) - set(b)), sorted(set(b) - set(a))
    raise InputError(
        f'training has {len(a)} classes and validation {len(b)}; '
        f'only in training: {", ".join(only_train[:5]) or "none"}; '
        f'only in validation: {", ".join(only_val[:5]) or "none"}'
    )
