"""Counter-based random numbers: each is a function of a key and a position, so no generator state is kept.

The numbers are SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the counter times an odd constant, then a
bijective mix of 64 bits. Any stretch of a stream can be made at once, in any order, by any thread.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def derive_key(*words: int, key: int = 0) -> int:
    """Hash integers (a seed, a purpose, a pass number...) into one 64-bit key.

    `key` is that of the words before these: derive_key(a, b, c) == derive_key(c, key=derive_key(a, b)).
    """
    for word in words:
        key = _mix((key + _GOLDEN + (word & _MASK)) & _MASK)
    return key


def uniform(key: int, start: int, count: int) -> NDArray[np.float64]:
    """Numbers `start` to `start + count - 1` of the stream `key`, each uniform in [0, 1), shape [count]."""
    z = np.arange(start, start + count, dtype=np.uint64)
    z *= np.uint64(_GOLDEN)
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    z >>= np.uint64(11)
    return np.multiply(z, 2.0**-53, dtype=np.float64)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)
