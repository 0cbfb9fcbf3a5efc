"""Images of one's own as arrays: an npz file with x_train and x_test, uint8 (N, H, W, C)."""

from pathlib import Path

import numpy as np

from nprf_vit.errors import InputError

from .npz import read_npz


def read_arrays(path: Path, split: str) -> np.ndarray:
    name = 'x_train' if split == 'train' else 'x_test'
    array = read_npz(path, (name,)).get(name)
    if array is None or array.ndim != 4 or array.dtype != np.uint8:
        got = 'absent' if array is None else f'{array.dtype} {array.shape}'
        raise InputError(f'{name} in {path} is {got}: expected uint8 images (N, H, W, C)')
    return array
