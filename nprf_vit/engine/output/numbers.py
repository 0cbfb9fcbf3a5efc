"""Numbers as people read them."""

import math
from datetime import timedelta


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def decimals(value: float, width: int = 0, digits: int = 4) -> str:
    """A fixed number of decimals, or an exponent for a diverged number that would not fit its column."""
    return f'{value:>{width}.{digits}f}' if abs(value) < 1e4 or not math.isfinite(value) else f'{value:>{width}.2e}'
