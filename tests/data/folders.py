"""A small ImageFolder of real digit scans."""

from pathlib import Path

from nprf_vit.data.datasets.digits import Digits

CLASSES = 4


def digit_folder(root: Path, train: int = 24, val: int = 7, val_name: str = 'val') -> Path:
    """Write `train` and `val` scans of each of four digits as PNG files under ROOT/SPLIT/CLASS."""
    for split, folder, count in (('train', 'train', train), ('validation', val_name, val)):
        digits = Digits(split)
        for digit in range(CLASSES):
            target = root / folder / f'digit{digit}'
            target.mkdir(parents=True)
            chosen = [i for i in range(len(digits)) if digits.targets[i] == digit][:count]
            for number, index in enumerate(chosen):
                digits[index][0].save(target / f'{number:03d}.png')
    return root
