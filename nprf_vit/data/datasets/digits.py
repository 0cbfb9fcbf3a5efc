"""scikit-learn's bundled digits: 1797 real 8×8 scans with 17 grey levels, available without a download."""

import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image

from nprf_vit.errors import InputError

LEVELS = 17  # 0..16


def _read_table() -> np.ndarray:
    """The file behind sklearn.datasets.load_digits, whose import alone takes longer than some epochs."""
    package = importlib.util.find_spec('sklearn')
    if package is None or not package.submodule_search_locations:
        raise InputError('dataset digits needs scikit-learn: install nprf_vit[digits]')
    path = Path(package.submodule_search_locations[0]) / 'datasets' / 'data' / 'digits.csv.gz'
    if not path.is_file():
        raise InputError(f'this scikit-learn has no {path.name} in {path.parent}')
    return np.loadtxt(path, delimiter=',', dtype=np.uint8)


class Digits:
    """A fixed stratified split: images sorted by class, each fifth is validation (360), the others training (1437)."""

    classes = tuple(str(digit) for digit in range(10))

    def __init__(self, split: str) -> None:
        table = _read_table()  # N, 65: the pixels row by row, then the class
        pixels, targets = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
        by_class = np.argsort(targets, kind='stable')
        held_out = np.arange(len(by_class)) % 5 == 0
        chosen = by_class[held_out if split.startswith('val') else ~held_out]
        self.levels = pixels[chosen]  # N, 8, 8 in 0..16
        self.targets = targets[chosen]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        grey = np.rint(self.levels[index] * (255 / (LEVELS - 1))).astype(np.uint8)
        return Image.fromarray(grey), int(self.targets[index])
