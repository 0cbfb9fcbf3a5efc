"""`nprf-train` from a checkout: python train.py --config configs/digits.yaml, or the same under torchrun"""

import sys

from nprf_vit.train import main, run

__all__ = ['main']

if __name__ == '__main__':
    sys.exit(run())
