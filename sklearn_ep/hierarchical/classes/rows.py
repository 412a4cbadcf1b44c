"""Rows by the weights of one class: coefficients, then whitened effects of all factors.

The effects a = L u of a level have whitened effects u ~ N(0, I), so that theta is in the rows and
the prior is the same at every theta. A row has D dense entries and a few more, one for each effect
it has in each factor::

        coefficients     factor 1         factor 2
    row [  x_1 .. x_D | . . w'L . . . | . w'L . . . . . ]
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator

from ..exact.layout import SharedRows, shared_entries

__all__ = ["EffectLayout", "EffectRows", "lay_out_effects"]


class EffectRows(LinearOperator):
    """Rows (n, q) as an operator that knows its few entries beyond the dense columns.

    Parameters
    ----------
    X : ndarray of shape (n, D)
    at : ndarray of shape (n, E)
        Columns of the entries, counted from the end of the dense ones.
    value : ndarray of shape (n, E)
    width : int
        Number of columns beyond the dense ones.
    """

    def __init__(self, X, at, value, width):
        super().__init__(np.float64, (len(X), X.shape[1] + width))
        self.entries, self.width = SharedRows(X, at, value), width
        ends = np.arange(len(X) + 1) * at.shape[1]
        self.beyond = csr_array((value.ravel(), at.ravel(), ends), shape=(len(X), width))

    def _matmat(self, weights):
        d = self.entries.X.shape[1]
        return self.entries.X @ weights[:d] + self.beyond @ weights[d:]

    def _rmatmat(self, pull):
        return np.vstack([self.entries.X.T @ pull, self.beyond.T @ pull])

    @cached_property
    def _products(self):
        """Places (n, E E) of the products of entries in a (width, width) matrix, their values."""
        _, at, value = self.entries
        places = at[:, :, None] * self.width + at[:, None, :]
        values = value[:, :, None] * value[:, None, :]
        return places.ravel(), values.reshape(len(value), -1)

    def weighted_gram(self, weight):
        """Return the rows' weighted sum of squares (q, q) for weights (n,) of any sign."""
        X, d, width = self.entries.X, self.entries.X.shape[1], self.width
        out, weighted = np.empty((d + width, d + width)), weight[:, None] * X
        out[:d, :d] = X.T @ weighted
        out[d:, :d] = self.beyond.T @ weighted
        out[:d, d:] = out[d:, :d].T
        places, values = self._products
        mass = (weight[:, None] * values).ravel()
        out[d:, d:] = np.bincount(places, mass, minlength=width**2).reshape(width, width)
        return out

    def quadratic(self, matrix):
        """Return z' matrix z (n,) of each row z for any matrix (q, q)."""
        return self.entries.variances(0.5 * (matrix + matrix.T))


class EffectLayout(NamedTuple):
    """Where the effects of rows are, whatever the scales.

    X (n, D) are the dense columns, designs (n, q_f) those of each factor, at (n, E) the columns of
    the effects among all `width`; known (n, F) says whose level has effects in the model.
    """

    X: np.ndarray
    designs: list[np.ndarray]
    at: np.ndarray
    known: np.ndarray
    width: int

    def take(self, rows):
        """Return some of the rows."""
        designs = [w[rows] for w in self.designs]
        return EffectLayout(self.X[rows], designs, self.at[rows], self.known[rows], self.width)

    def whitened(self, lowers):
        """Return the `EffectRows` for Cholesky factors (q_f, q_f) of the effects' covariances."""
        values: list[Any] = [np.zeros((len(self.X), 0))]
        for f, design in enumerate(self.own(lowers)):
            values.append(np.where(self.known[:, f, None], design, 0.0))
        return EffectRows(self.X, self.at, np.hstack(values), self.width)

    def own(self, lowers):
        """Return the designs (n, q_f) of the whitened effects of each factor."""
        return [w @ lower for w, lower in zip(self.designs, lowers, strict=True)]

    def unseen_variance(self, lowers):
        """Return the prior variance (n,) of what a class has from levels that are not known."""
        out = np.zeros(len(self.X))
        for f, design in enumerate(self.own(lowers)):
            out += np.where(self.known[:, f], 0.0, np.sum(design**2, axis=1))
        return out


def lay_out_effects(X, designs, codes, n_levels, n_named=None):
    """Return the `EffectLayout` of rows.

    Parameters
    ----------
    X : ndarray of shape (n, D)
    designs : list of ndarray of shape (n, q_f)
    codes : ndarray of shape (n, F)
        Levels as numbers.
    n_levels : list of int
        Levels of each factor that have effects.
    n_named : list of int or None, default=None
        Levels that rows to predict can have, the first ones; None for all. Other codes mean a level
        that is not known.
    """
    n_named = n_levels if n_named is None else n_named
    codes = np.asarray(codes).reshape(len(X), len(n_levels))
    known = (codes >= 0) & (codes < np.array(n_named, dtype=int))
    levels = np.where(known, codes, 0).T
    at, _ = shared_entries(len(X), designs, levels, n_levels)
    width = sum(n * w.shape[1] for n, w in zip(n_levels, designs, strict=True))
    return EffectLayout(X, list(designs), at, known, width)
