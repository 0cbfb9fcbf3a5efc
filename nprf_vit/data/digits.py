"""scikit-learn's bundled digits: 1797 real 8×8 scans with 17 grey levels, available without a download."""

import numpy as np
from PIL import Image

from ..errors import InputError

LEVELS = 17  # 0..16


class Digits:
    """A fixed stratified split: images sorted by class, each fifth is validation (360), the others training (1437)."""

    classes = tuple(str(digit) for digit in range(10))

    def __init__(self, split: str):
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError:
            raise InputError('dataset digits needs scikit-learn: install nprf_vit[digits]') from None
        data = load_digits()
        by_class = np.argsort(data.target, kind='stable')
        held_out = np.arange(len(by_class)) % 5 == 0
        chosen = by_class[held_out if split.startswith('val') else ~held_out]
        self.levels = data.images[chosen].astype(np.uint8)  # N, 8, 8 in 0..16
        self.targets = data.target[chosen]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        grey = np.rint(self.levels[index] * (255 / (LEVELS - 1))).astype(np.uint8)
        return Image.fromarray(grey), int(self.targets[index])
