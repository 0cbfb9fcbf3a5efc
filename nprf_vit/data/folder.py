"""The usual mistakes in an ImageNet-style folder, each with its own message."""

from pathlib import Path

from timm.data import create_dataset
from timm.data.dataset import ImageDataset
from timm.data.readers.reader_image_folder import ReaderImageFolder

from ..errors import InputError

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
    if not base.exists():
        raise InputError(f'the data folder {root} does not exist')
    path = split_folder(base, split)
    try:
        dataset = create_dataset('', root=str(path), split=split, search_split=False, input_img_mode=mode)
    except RuntimeError as error:  # timm's word for "no images"
        raise InputError(f'{path} holds no images: {error}') from None
    if isinstance(dataset.reader, ReaderImageFolder):
        _check_classes(path, dataset.reader)
    return dataset


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
