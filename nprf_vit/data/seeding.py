"""Seeds as functions of what they are for, so that no result depends on which process or worker does the work."""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from named parts, the same on every platform (Python's own hash is salted per process)."""
    text = '/'.join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'little') >> 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the body with Python's, NumPy's and torch's CPU generators at `seed`, then put them back as they were.

    timm's transforms draw from all three. torch.manual_seed would also touch CUDA, which a forked worker may not.
    """
    # NumPy's generator is exchanged: saving and restoring its state takes 150 us, more than many a transform
    states = random.getstate(), get_bit_generator(), torch.default_generator.get_state()
    random.seed(seed)
    set_bit_generator(np.random.PCG64(seed))
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        set_bit_generator(states[1])
        torch.default_generator.set_state(states[2])
