"""Centring, scaling and weighting of a regression, and the way back to the user's units."""

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from sklearn.utils import check_array

from .._engine.partition import PartMap
from .._estimator.checks import check_number
from .._estimator.row_parts import (
    RowStatistics,
    axes_of,
    check_facts,
    facts_of_part,
    statistics_of_parts,
    statistics_of_rows,
)
from ._linear_model import BLOCK_BYTES, LinearModel, column_blocks

# Least eigenvalue of products with unit diagonal, by rounding; below it they are those of no rows.
_LEAST_EIGENVALUE = -1e-8


def statistics_of_products(XtX, Xty, yty, n_samples, X_mean=None, y_mean=0.0):
    """Return the `RowStatistics` of rows of which sums of products and means are known.

    A ValueError names what cannot be that of any rows.
    """
    check_number("n_samples", n_samples, 2, integer=True)
    XtX = check_array(XtX, dtype=np.float64, input_name="XtX")
    d = XtX.shape[1]
    known = {"Xty": (Xty, (d,)), "yty": (yty, ()), "y_mean": (y_mean, ())}
    known["X_mean"] = (np.zeros(d) if X_mean is None else X_mean), (d,)
    for name, (value, shape) in known.items():
        if np.shape(value) != shape or not np.all(np.isfinite(value)):
            raise ValueError(f"{name} must be finite and of shape {shape}, got {np.shape(value)}.")
    size = np.sqrt(np.abs(np.diagonal(XtX)))
    if len(XtX) != d or np.any(np.abs(XtX - XtX.T) > 1e-8 * np.outer(size, size)):
        raise ValueError("XtX must be a symmetric matrix.")
    products = np.block([[XtX, np.reshape(Xty, (d, 1))], [np.reshape(Xty, (1, d)), yty]])
    mean = np.append(known["X_mean"][0], y_mean).astype(float)
    scatter = products - n_samples * np.outer(mean, mean)
    values, directions = axes_of(scatter)
    if values[0] < _LEAST_EIGENVALUE or np.any(np.diagonal(scatter) < 0):
        raise ValueError("XtX, Xty, yty and the means of no rows: not positive semidefinite.")
    held = values > 10 * len(values) * np.finfo(float).eps
    root = np.sqrt(values[held])[:, None] * directions[held]
    return RowStatistics(int(n_samples), float(n_samples), mean, root)


def statistics_of_user_parts(estimator, parts, check_response):
    """Return the `RowStatistics` of a user's partitions, in part order.

    `check_response` is given the least and largest response before any other work.
    """
    with PartMap(parts, estimator.n_jobs, prefer="threads") as run:
        facts = run(facts_of_part, range(len(run.parts)), False)
        check_facts(estimator, facts)
        check_response(np.concatenate([f.labels for f in facts]))
        n = sum(f.n_rows for f in facts)
        if n < 2:
            raise ValueError(
                f"all partitions together have n_samples={n}, a minimum of 2 is needed."
            )
        return statistics_of_parts(run, facts)


def standardise_statistics(stats, fit_intercept, standardize):
    """Return (Standardisation, LinearModel), as `standardise` does for rows in memory."""
    total, mean, root = stats.weight, stats.mean, stats.root.copy()
    rounding = 10 * np.finfo(float).eps * np.sqrt(stats.n_rows)
    sd = np.sqrt(np.einsum("ij,ij->j", root[:, :-1], root[:, :-1]) / total)
    sd[sd <= rounding * np.abs(mean[:-1])] = 0.0
    if fit_intercept:
        root[:, :-1][:, sd == 0] = 0.0
    else:
        root, mean = stats.about_zero(), np.zeros_like(mean)
    scale = np.where(sd > 0, sd, 1.0) if standardize else np.ones(len(sd))
    y_scale = float(np.linalg.norm(root[:, -1]) / np.sqrt(total))
    if y_scale <= rounding * abs(mean[-1]):
        y_scale, root[:, -1] = 1.0, 0.0
    root[:, :-1] /= scale
    root[:, -1] /= y_scale
    units = Standardisation(
        mean[:-1], scale, float(mean[-1]), y_scale, total,
        total - 1 if fit_intercept else total, fit_intercept,
    )  # fmt: skip
    return units, LinearModel.of_root(root)


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

    def response(self, signal):
        """Bring working responses, offset left out, to the units of the user."""
        return self.y_offset + self.y_scale * signal

    def intercept(self, coef):
        """Return the intercept (...) that belongs to coefficients (..., d) of the user."""
        return self.y_offset - coef @ self.offset

    def with_intercept(self, coef, noise, rng):
        """Return draws of coefficients (S, d) of the user, an intercept drawn last if there is one.

        `noise` is its variance in the units of the user, (S,) or one for all draws.
        """
        if not self.fit_intercept:
            return coef
        sd = np.sqrt(self.intercept_variance(noise))
        return np.column_stack([coef, self.intercept(coef) + sd * rng.standard_normal(len(coef))])

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


def scaled_columns(training, fit_intercept, standardize, owned):
    """Return X with columns centred and scaled as asked, what was taken off them and their scales.

    `owned` says that the array X may be overwritten. Constant columns become zero where an
    intercept is fitted.
    """
    X = dense_rows(training.X)
    if not (owned and X.flags.writeable):
        X = np.array(X, dtype=np.float64, order="K", subok=False)
    mean, sd = _moments(X, training.weight, fit_intercept)
    scale = np.where(sd > 0, sd, 1.0) if standardize else np.ones(X.shape[1])
    for block in column_blocks(X):
        part = X[:, block]
        if fit_intercept:
            part -= mean[block]
            part[:, sd[block] == 0] = 0.0
        if standardize:
            part /= scale[block]
    return X, mean, scale


def standardise(training, fit_intercept, standardize, owned):
    """Return (Standardisation, LinearModel) of checked training data.

    `owned` says that the array X may be overwritten. O(n d), with one block of columns as extra
    memory, and 8 n d bytes where X is sparse, 8 d^2 where it is tall besides.
    """
    y, weight = training.y, training.weight
    if sp.issparse(training.X) and training.X.shape[0] > 2 * training.X.shape[1]:
        stats = statistics_of_rows(training.X.tocsr(), y, weight)
        return standardise_statistics(stats, fit_intercept, standardize)
    X, mean, scale = scaled_columns(training, fit_intercept, standardize, owned)
    total = float(weight.sum())
    y_offset = float(weight @ y / total) if fit_intercept else 0.0
    root = np.sqrt(weight)
    y = (y - y_offset) * root
    y_scale = np.sqrt(y @ y / total)
    # a constant y leaves rounding behind, which is no scale to measure by
    if y_scale <= 10 * np.finfo(float).eps * np.sqrt(len(y)) * abs(y_offset):
        y_scale, y = 1.0, np.zeros_like(y)
    if not np.all(weight == 1):
        for block in column_blocks(X):
            X[:, block] *= root[:, None]
    n_rows = total - 1 if fit_intercept else total
    units = Standardisation(mean, scale, y_offset, float(y_scale), total, n_rows, fit_intercept)
    return units, LinearModel(X, y / y_scale)
