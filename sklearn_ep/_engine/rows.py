"""Rows by their content: random orders that depend on nothing else, and which rows are copies.

A seeded hash gives every row a key. Sorting by it is a random order that does not change when rows
come in another order, in parts, or with weights in place of repetitions: equal rows have equal keys
and stay together, as the tied copies that they are. `find_copies` says of rows in memory which are
equal, `taken_copies` which go together where a row is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from .gaussian import row_blocks
from .sites import one_copy

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


@dataclass
class Copies:
    """Which rows are copies of which: equal rows as one of so many copies, in an order of its own.

    first (m,) are the rows that stand for theirs, group (n,) says for each row which of them does,
    weight (m,) is that of all copies and share (n,) that of each row in it.
    """

    first: np.ndarray
    group: np.ndarray
    weight: np.ndarray
    share: np.ndarray

    @property
    def of_each(self) -> np.ndarray:
        """How many copies (n,) of each row there are."""
        return self.weight[self.group]

    def of_rows(self, values: np.ndarray) -> np.ndarray:
        """Return values (..., m) of rows that stand for others for all rows (..., n)."""
        return values[..., self.group]

    def shared(self, values: np.ndarray) -> np.ndarray:
        """Return the same where values are of all copies together, of which each has its share."""
        return self.of_rows(values) * self.share

    def as_seen(self) -> "Copies":
        """Return the same in the order in which rows were first seen."""
        order = np.argsort(self.first)
        group = np.argsort(order)[self.group]
        return Copies(self.first[order], group, self.weight[order], self.share)


def find_copies(X: Any, weight: np.ndarray, y: np.ndarray | None = None) -> Copies:
    """Return the `Copies` among rows X (n, d), dense or CSR, of weight (n,), and equal labels y."""
    y = np.zeros(len(weight)) if y is None else y
    key = X @ np.random.RandomState(0).standard_normal(X.shape[1])
    order = np.argsort(key, kind="stable")
    # so far apart, relative to the largest, products are surely those of different rows
    apart = np.diff(key[order], prepend=-np.inf) > 1e-12 * np.max(np.abs(key), initial=1.0)
    near = np.cumsum(apart)
    keys = np.zeros(len(y), dtype=np.uint64)
    several = np.bincount(near)[near] > 1
    if np.any(several) and not sp.issparse(X):
        # products may be as near where rows differ: one column is far larger than the others
        keys[several] = row_keys(X[order[several]], 0)
    sort = np.lexsort((keys, y[order], near))
    order, near = order[sort], near[sort]
    new = (np.diff(near, prepend=-1) > 0) | (np.diff(y[order], prepend=-1) != 0)
    doubtful = np.flatnonzero(~new)
    new[doubtful] = _differ(X, order[doubtful], order[doubtful - 1])
    group = np.empty(len(y), dtype=np.intp)
    group[order] = np.cumsum(new) - 1
    total = np.bincount(group, weights=weight)
    return Copies(order[new], group, total, weight / total[group])


def _differ(X: Any, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return whether pairs of rows differ at all."""
    if not sp.issparse(X):
        return np.any(X[rows] != X[others], axis=1)
    return np.diff((X[rows] != X[others]).tocsr().indptr) > 0


def taken_copies(place: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return how many copies (n,) go with a row that is left out; equal rows have one place (n,).

    All with its label do, since one would foretell the others. Where equal rows have several labels
    they are repeats of a measurement, of which one goes: the others tell of it what they tell of a
    new row, and without all of its label those of other labels would speak against it.
    """
    labels, index = np.unique(y, return_inverse=True)
    both, own = np.unique(place * len(labels) + index, return_inverse=True)
    several = np.bincount(both // len(labels))[place] > 1
    return np.where(several, one_copy(weight), np.bincount(own, weight)[own])
