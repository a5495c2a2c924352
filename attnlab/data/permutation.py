"""A pseudorandom permutation that is computed for each index separately, without a table.

A Feistel network of four rounds with Simon's round function (Beaulieu et al. 2013, eprint.iacr.org/2013/404), repeated
until its result is in range (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). It equals
`grain.experimental.index_shuffle(index, max_index=size - 1, seed=seed, rounds=4)`, so that runs begun with Grain
continue with the same batches. They differ if size − 1 is a power of four from 4⁸ on: there Grain's block is two bits
too narrow, and Grain maps the last index to the image of the first.
"""

import functools

import numpy as np

ROUNDS = 4
SMALLEST_BLOCK = 16  # bits; permutations of smaller blocks show patterns


def permuted(index: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The images of indices under a permutation of `range(size)`, int64 `[n]`.

    Args:
      index: from 0 to size − 1, int64 `[n]`.
      size: number of permuted indices, at least 1.
      seed: from 0 to 2³² − 1; determines the permutation.
    """
    if size == 1:
        return index
    bits = (size - 1).bit_length()
    half, keys = max(bits + bits % 2, SMALLEST_BLOCK) // 2, _round_keys(seed)
    index = _encrypted(index, half, keys)
    while (outside := index >= size).any():
        index[outside] = _encrypted(index[outside], half, keys)
    return index


def _encrypted(value: np.ndarray, half: int, keys: tuple[int, ...]) -> np.ndarray:
    """Permute numbers of 2 · half bits."""
    mask = (1 << half) - 1
    left, right = value >> half & mask, value & mask
    for key in keys:
        twice = right << half | right  # so that a rotation is a shift
        mixed = (twice >> half - 1) & (twice >> half - 8) ^ (twice >> half - 2)
        left, right = right, (left ^ mixed ^ key) & mask
    return left << half | right


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int) -> tuple[int, ...]:
    """`ROUNDS` words of 32 bits from `std::seed_seq{seed}` of C++ (ISO/IEC 14882, [rand.util.seedseq]).

    The standard's offsets for four words are p = 1 and q = 2.
    """
    words = [0x8B8B8B8B] * ROUNDS

    def add(word: int, number: int) -> None:
        words[word % ROUNDS] = (words[word % ROUNDS] + number) % 2**32

    for k in range(ROUNDS):
        mixed = words[k] ^ words[(k + 1) % ROUNDS] ^ words[k - 1]
        first = 1664525 * (mixed ^ mixed >> 27) % 2**32
        second = first + (1 if k == 0 else k + seed if k == 1 else k)  # 1 is the number of seeds
        add(k + 1, first)
        add(k + 2, second)
        words[k] = second % 2**32
    for k in range(ROUNDS):
        mixed = (words[k] + words[(k + 1) % ROUNDS] + words[k - 1]) % 2**32
        first = 1566083941 * (mixed ^ mixed >> 27) % 2**32
        second = (first - k) % 2**32
        words[(k + 1) % ROUNDS] ^= first
        words[(k + 2) % ROUNDS] ^= second
        words[k] = second
    return tuple(words)
