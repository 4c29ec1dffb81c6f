"""Random streams that depend on the request alone: one uniform number per (seed, sample, position).

No generator holds state, so a draw is the same in every batch, on every worker and after every retry.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD = 0xFFFF_FFFF_FFFF_FFFF


def uniforms(seeds: list[int], samples: list[int], positions: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per entry, with 53 random bits.

    Args:
        seeds: Any integers; taken modulo 2**64.
        samples: Index of the sample, from 0.
        positions: Index in the text of the token being drawn.
    """
    mixed = _splitmix(np.array([seed & _WORD for seed in seeds], np.uint64))
    mixed = _splitmix(mixed ^ np.array(samples, np.uint64))
    mixed = _splitmix(mixed ^ np.array(positions, np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
