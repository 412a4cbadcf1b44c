"""Random orders of rows that depend on the content of the rows alone.

A seeded hash gives every row a key. Sorting by it is a random order that does not change when rows
come in another order, in parts, or with weights in place of repetitions: equal rows have equal keys
and stay together, as the tied copies that they are.
"""

from collections.abc import Iterator

import numpy as np

from .gaussian import row_blocks

_ODD = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 20


def spread_bits(h: np.ndarray) -> np.ndarray:
    """Return 64-bit words with every bit spread over all others (splitmix64 finaliser)."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def row_keys(X: np.ndarray, seed: int, y: np.ndarray | None = None) -> np.ndarray:
    """Return random 64-bit keys (n,) of rows, equal for equal rows (and labels, if given).

    Parameters
    ----------
    X : ndarray of shape (n, d)
    seed : int
        Another seed gives another order.
    y : ndarray of int of shape (n,), default=None
    """
    n, d = X.shape
    rng = np.random.default_rng(seed)
    factors = rng.integers(0, 2**63, size=d + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    keys = np.zeros(n, dtype=np.uint64)
    for rows in row_blocks(n, d, _BLOCK):
        # adding zero makes -0.0 and 0.0 the same bits
        words = (np.asarray(X[rows], dtype=np.float64) + 0.0).view(np.uint64)
        words = (words ^ (words >> np.uint64(32))) * _ODD
        words ^= words >> np.uint64(29)
        words *= factors[:d]
        keys[rows] = words.sum(axis=1, dtype=np.uint64)
    if y is not None:
        keys += spread_bits(y.astype(np.uint64) + factors[d])
    return spread_bits(keys)


def other_keys(keys: np.ndarray, seed: int) -> np.ndarray:
    """Return keys of another random order, made of those of one without a look at the rows."""
    return spread_bits(keys ^ spread_bits(np.asarray([seed], dtype=np.uint64) * _ODD))


def minibatches(keys: np.ndarray, weight: np.ndarray, size: float) -> Iterator[np.ndarray]:
    """Cut rows in key order into batches of about `size` copies; yield arrays of row numbers.

    Rows with equal keys are in the same batch.
    """
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    first = np.r_[True, sorted_keys[1:] != sorted_keys[:-1]]
    before = np.cumsum(weight[order]) - weight[order]
    n_batches = max(1, round(float(weight.sum()) / size))
    width = weight.sum() / n_batches
    # the copies in front of a group decide for all of it; the margin absorbs rounding
    batch = np.floor(before[first] / width + 1e-9).astype(int)
    number = batch[np.cumsum(first) - 1]
    cuts = np.flatnonzero(np.diff(number)) + 1
    yield from np.split(order, cuts)
