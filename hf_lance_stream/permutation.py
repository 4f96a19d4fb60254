"""A keyed pseudo-random permutation of ``range(n)`` that takes O(1) memory.

The order of an epoch is built on it, so its values are pinned by golden files: a change of
anything here that changes a value must raise `ORDER_VERSION`.
"""

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1
"""Version of the order an epoch has; part of every saved state."""

SEED_LIMIT = 2**64
"""Seeds and epochs are integers in ``[0, SEED_LIMIT)``."""

MAX_LENGTH = 2**62
"""Largest `n` a permutation can have."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1
_BLOCK = 1 << 16  # positions worked on at a time: the temporaries stay in the cache

Int64Array = npt.NDArray[np.int64]
_Keys = list[tuple[np.uint32, np.uint32]]


def mix64(value: int) -> int:
    """Mix the bits of a 64-bit integer; a bijection of ``[0, 2**64)``.

    The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014).
    """
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def derive_key(*words: int) -> int:
    """Hash integers in ``[0, 2**64)`` into one 64-bit key; the order of the words matters."""
    key = _GOLDEN_GAMMA
    for word in words:
        key = mix64(((key ^ word) + _GOLDEN_GAMMA) & _MASK64)
    return key


class Permutation:
    """A permutation of ``range(n)`` chosen by a 64-bit key.

    An alternating, unbalanced Feistel network over the smallest power of two that holds `n`,
    with cycle walking for the values beyond `n` (Black and Rogaway, "Ciphers with arbitrary
    finite domains", CT-RSA 2002). A value costs fewer than two passes through the network on
    average; nothing is stored but the round keys.

    Args:
        n: number of elements, ``1 <= n <= 2**62``.
        key: integer in ``[0, 2**64)``; see `derive_key`.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= MAX_LENGTH:
            raise ValueError(f"`n` must be between 1 and 2**62: got n={n}")
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._low_bits = np.uint64(bits - bits // 2)
        self._low_mask = np.uint32((1 << (bits - bits // 2)) - 1)
        self._high_mask = np.uint32((1 << (bits // 2)) - 1)
        words = [
            mix64((key + i * _GOLDEN_GAMMA) & _MASK64) for i in range(1, _num_rounds(bits) + 1)
        ]
        self._keys: _Keys = [(np.uint32(w & 0xFFFFFFFF), np.uint32(w >> 32)) for w in words]

    def __call__(self, positions: npt.ArrayLike) -> Int64Array:
        """Images of `positions`, an int array of any shape with values in ``[0, n)``."""
        return self._walk(positions, inverse=False)

    def inverse(self, values: npt.ArrayLike) -> Int64Array:
        """Positions whose images are `values`, an int array of any shape in ``[0, n)``."""
        return self._walk(values, inverse=True)

    def _walk(self, values: npt.ArrayLike, *, inverse: bool) -> Int64Array:
        values = np.asarray(values, dtype=np.int64)
        flat = values.reshape(-1)
        out = np.empty(flat.shape, dtype=np.int64)
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK].astype(np.uint64)
            block = self._network(block, inverse=inverse)
            outside = np.flatnonzero(block >= self.n)
            while outside.size:
                block[outside] = self._network(block[outside], inverse=inverse)
                outside = outside[block[outside] >= self.n]
            out[start : start + _BLOCK] = block.view(np.int64)
        return out.reshape(values.shape)

    def _network(self, values: npt.NDArray[np.uint64], *, inverse: bool) -> npt.NDArray[np.uint64]:
        low = values.astype(np.uint32) & self._low_mask
        high = (values >> self._low_bits).astype(np.uint32)
        rounds = range(len(self._keys))
        for i in reversed(rounds) if inverse else rounds:
            if i % 2 == 0:
                high ^= _round_function(low, *self._keys[i]) & self._high_mask
            else:
                low ^= _round_function(high, *self._keys[i]) & self._low_mask
        return (high.astype(np.uint64) << self._low_bits) | low


def _num_rounds(bits: int) -> int:
    """Rounds after which no test of ours tells the network from a random permutation.

    The narrower the halves, the more rounds it takes; see `tests/test_shuffle_quality.py`.
    """
    if bits <= 10:
        return 24
    return 8 if bits <= 16 else 6


def _round_function(
    half: npt.NDArray[np.uint32], key: np.uint32, second_key: np.uint32
) -> npt.NDArray[np.uint32]:
    """Keyed 32-bit hash: Wellons' `lowbias32` with a second key between its two halves."""
    h = half ^ key
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= second_key
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return h
