"""A random order of n samples as a pure function of (seed, epoch), in constant memory.

A four-round Feistel network over the smallest even number of bits that holds n is a permutation of that
range; walking its cycles until the value falls below n makes it a permutation of n (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

import numpy as np

ROUNDS = 4


def permute(index: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where each position of the order points: int64 [...] in [0, size), one to one."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    stream = _mix(_mix(np.array([seed], dtype=np.uint64)) + np.uint64(epoch))
    keys = _mix(np.arange(ROUNDS, dtype=np.uint64) + stream)
    value = _feistel(index.astype(np.uint64), half, keys)
    while (outside := value >= size).any():
        value[outside] = _feistel(value[outside], half, keys)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
