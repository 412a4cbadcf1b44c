"""What a Gaussian likelihood has to know of rows: their weight, means and a root of their scatter.

A part of the rows answers with a triangular factor R of its scatter about its own mean, R'R = sum w
(z - m)(z - m)' for z = [x y], and factors are merged by QR decompositions. X'X of dense rows is
never formed: for columns far from zero it would keep no digit.
"""

import functools
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.utils import gen_batches

from .row_parts import read_part

# Numbers of a block of rows that is worked on at a time, 16 MB.
BLOCK = 2**21
_LARGEST_BYTES = 2**31


class RowStatistics(NamedTuple):
    """Number of rows, their weight, weighted mean (d + 1,) of [X y], and root (r, d + 1)."""

    n_rows: int
    weight: float
    mean: np.ndarray
    root: np.ndarray

    def about_zero(self):
        """Return a root (r, d + 1) of the scatter about zero in place of the means."""
        return reduced(np.vstack([self.root, np.sqrt(self.weight) * self.mean]))


def reduced(rows):
    """Return at most d + 1 rows with the same scatter."""
    return np.linalg.qr(rows, mode="r") if rows.shape[0] > rows.shape[1] else rows


def merged(first, second):
    """Return the `RowStatistics` of two sets of rows."""
    weight = first.weight + second.weight
    gap = np.sqrt(first.weight * second.weight / weight) * (second.mean - first.mean)
    root = reduced(np.vstack([first.root, second.root, gap]))
    mean = first.mean + (second.weight / weight) * (second.mean - first.mean)
    return RowStatistics(first.n_rows + second.n_rows, weight, mean, root)


def _of_block(X, y, weight):
    """Return the `RowStatistics` of dense rows, centred twice: the first mean may be off."""
    Z, total = np.column_stack([X, y]), float(weight.sum())
    mean = weight @ Z / total
    Z -= mean
    shift = weight @ Z / total
    Z -= shift
    if not np.all(weight == 1.0):
        Z *= np.sqrt(weight)[:, None]
    return RowStatistics(len(y), total, mean + shift, reduced(Z))


def axes_of(scatter):
    """Return eigenvalues (d,) of a scatter with unit diagonal, and its axes (d, d) in its units."""
    sd = np.sqrt(np.maximum(np.diagonal(scatter), 0.0))
    sd[sd == 0] = 1.0
    values, vectors = np.linalg.eigh(scatter / sd[:, None] / sd)
    return values, vectors.T * sd


def _of_sparse(X, y, weight):
    """Return the `RowStatistics` of many CSR rows by their matrix of products.

    Its root comes from the eigenvalues of the matrix with unit diagonal: it may be singular.
    """
    Z, total = sp.hstack([X, y[:, None]], format="csr"), float(weight.sum())
    mean = np.asarray(Z.T @ weight).ravel() / total
    scatter = (Z.T @ Z.multiply(weight[:, None])).toarray() - total * np.outer(mean, mean)
    values, directions = axes_of(scatter)
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * directions
    return RowStatistics(len(y), total, mean, root)


def statistics_of_rows(X, y, weight):
    """Return the `RowStatistics` of rows X (n, d), dense or CSR; O(n d^2) flops for dense ones."""
    d = X.shape[1]
    if sp.issparse(X) and X.shape[0] > 2 * d:
        return _of_sparse(X, y, weight)
    blocks = (
        _of_block(X[rows].toarray() if sp.issparse(X) else X[rows], y[rows], weight[rows])
        for rows in gen_batches(len(y), max(2 * d + 2, BLOCK // (d + 1)))
    )
    return functools.reduce(merged, blocks)


def statistics_of_part(part, k):
    """Return the `RowStatistics` of partition k."""
    return statistics_of_rows(*read_part(part, k, classifier=False))


def statistics_of_parts(run, facts):
    """Return the `RowStatistics` of the parts of a `PartMap` with these `PartFacts`, in order."""
    n, d = sum(f.n_rows for f in facts), facts[0].n_features
    size = 8 * min(n, d + 1) * (d + 1)
    if size > _LARGEST_BYTES:
        raise ValueError(
            f"{n} rows of {d} columns reduce to a factor of {size / 2**30:.1f} GiB, more than "
            f"{_LARGEST_BYTES / 2**30:.0f}: leave columns out."
        )
    return functools.reduce(merged, run(statistics_of_part, range(len(run.parts))))
