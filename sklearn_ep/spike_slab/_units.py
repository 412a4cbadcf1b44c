"""Centring, scaling and weighting of a regression, and the way back to the user's units."""

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from ._columns import BLOCK_BYTES, column_blocks
from ._linear_model import LinearModel

__all__ = ["Standardisation", "dense_blocks", "dense_rows", "standardise"]


@dataclass
class Standardisation:
    """A regression in working units: columns of unit scale, y of unit variance.

    A working column is (x - offset) / scale, and y likewise. `total` is the total weight, the
    number of rows with repetition; `n_rows` in the likelihood are one less with an intercept, which
    has a flat prior.
    """

    offset: np.ndarray
    scale: np.ndarray
    y_offset: float
    y_scale: float
    total: float
    n_rows: float
    fit_intercept: bool

    def rows(self, X):
        """Bring new rows to working units."""
        return (X - self.offset) / self.scale

    def to_coef(self, w):
        """Bring working coefficients (..., d) to the units of the user."""
        return w * (self.y_scale / self.scale)

    def intercept(self, coef):
        """Return the intercept (...) that belongs to coefficients (..., d) of the user."""
        return self.y_offset - coef @ self.offset

    def intercept_variance(self, noise):
        """Variance of the mean of y given the coefficients, for noise in the user's units."""
        return noise / self.total if self.fit_intercept else 0.0


def dense_rows(X):
    """Return rows as a dense array: a sparse matrix has no zeros left once it is centred."""
    # one order for CSR and CSC: searches amplify the rounding of sums in another order
    return X.toarray(order="C") if sp.issparse(X) else X


def dense_blocks(X):
    """Yield the rows as dense arrays, those of a sparse matrix about BLOCK_BYTES at a time."""
    if not sp.issparse(X):
        yield X
        return
    X, step = X.tocsr(), max(1, BLOCK_BYTES // (8 * X.shape[1]))
    for start in range(0, X.shape[0], step):
        yield X[start : start + step].toarray()


def _moments(X, weight, centre):
    """Weighted mean and population sd of the columns; constant columns have sd 0."""
    total = weight.sum()
    mean, sd = np.empty(X.shape[1]), np.empty(X.shape[1])
    for block in column_blocks(X):
        part = X[:, block]
        mean[block] = weight @ part / total
        part = part - mean[block]
        # a second pass takes the rounding of the mean out of columns far from zero
        shift = weight @ part / total
        mean[block] += shift
        sd[block] = np.sqrt(np.maximum(weight @ (part - shift) ** 2 / total, 0.0))
    constant = sd <= 10 * np.finfo(float).eps * np.sqrt(len(X)) * np.abs(mean)
    return np.where(centre, mean, 0.0), np.where(constant, 0.0, sd)


def standardise(training, fit_intercept, standardize, owned):
    """Return (Standardisation, LinearModel) of checked training data.

    `owned` says that the array X may be overwritten. O(n d), with one block of columns as extra
    memory, and 8 n d bytes where X is sparse.
    """
    X, y, weight = dense_rows(training.X), training.y, training.weight
    if not (owned and X.flags.writeable):
        X = np.array(X, dtype=np.float64, order="K", subok=False)
    mean, sd = _moments(X, weight, fit_intercept)
    scale = np.where(sd > 0, sd, 1.0) if standardize else np.ones(X.shape[1])
    total = float(weight.sum())
    y_offset = float(weight @ y / total) if fit_intercept else 0.0
    root = np.sqrt(weight)
    y = (y - y_offset) * root
    y_scale = np.sqrt(y @ y / total)
    # a constant y leaves rounding behind, which is no scale to measure by
    if y_scale <= 10 * np.finfo(float).eps * np.sqrt(len(y)) * abs(y_offset):
        y_scale, y = 1.0, np.zeros_like(y)
    for block in column_blocks(X):
        part = X[:, block]
        if fit_intercept:
            part -= mean[block]
            part[:, sd[block] == 0] = 0.0
        if standardize:
            part /= scale[block]
        if not np.all(weight == 1):
            part *= root[:, None]
    n_rows = total - 1 if fit_intercept else total
    units = Standardisation(mean, scale, y_offset, float(y_scale), total, n_rows, fit_intercept)
    return units, LinearModel(X, y / y_scale)
