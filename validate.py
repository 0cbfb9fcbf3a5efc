"""`nprf-validate` from a checkout: python validate.py --config FILE --checkpoint FILE"""

import sys

from nprf_vit.validate import main, run

__all__ = ['main']

if __name__ == '__main__':
    sys.exit(run())
