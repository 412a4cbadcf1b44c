"""Exact covariances of the weights of all classes: by a matrix of these, or by those of the rows.

With n rows B, q columns and prior variances V the predictors of the rows have the prior covariance
B V B' in each class. Where rows are few for their columns all classes have a posterior for the
price of n x n matrices, that of `ClassLatents`, in place of one of K q x K q. The weights follow:
of class c they have covariances V B' with the predictors of class c and none with the others.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cholesky

from .._engine import class_structures, gaussian
from .._engine.class_sites import stars
from ._systems import DiagonalCovariance


class ClassSpread:
    """Covariance of the weights of all classes as an array (K, q, K, q)."""

    def __init__(self, array):
        self.array = array

    def variance(self):
        """Return the variances (K, q) of the weights."""
        return np.einsum("cqcq->cq", self.array)

    def rows(self, B):
        """Return the covariances (n, K, K) of the predictors of rows."""
        return class_structures.class_covariances(self.array, B)

    def weights_with(self, B, c, j):
        """Return the covariance (q, n) of the weights of class c with class j at rows."""
        return np.ascontiguousarray(np.asarray(B @ self.array[j, :, c]).T)

    def draw(self, n_samples, rng):
        """Return draws (K, n_samples, q) of the weights about their means."""
        K, q = self.array.shape[:2]
        lower = cholesky(self.array.reshape(K * q, K * q), lower=True)
        draws = rng.standard_normal((n_samples, K * q)) @ lower.T
        return draws.reshape(n_samples, K, q).transpose(1, 0, 2)


class SpreadByRows:
    """The same by the precisions of sites (n, K) of training rows B (n, q), copies counted.

    `variances` (q,) are those of the prior.
    """

    def __init__(self, B, variances, precision):
        self.B, self.prior, self.precision = B, DiagonalCovariance(variances), precision

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "latents"}

    @cached_property
    def latents(self):
        """The `ClassCovariance` of the predictors, found at first use; O(K n^3)."""
        known = self.prior.covariance(self.B, self.B), self.precision
        return class_structures.ClassCovariance(*known)

    @cached_property
    def array(self):
        """The covariance as an array (K, q, K, q)."""
        K, q = self.precision.shape[1], self.B.shape[1]
        if K * q > class_structures.MOST_WEIGHTS:
            raise ValueError(
                f"the covariance of {K * q} coefficients of all classes is too large a matrix; the "
                f"limit is {class_structures.MOST_WEIGHTS}: fit with multi_class='one_vs_rest'."
            )
        out = np.empty((K, q, K, q))
        for c in range(K):
            for j in range(K):
                out[c, :, j] = self.weights_with(np.eye(q), c, j)
        return out

    def variance(self):
        """Return the variances (K, q) of the weights; O(K n^2 q), for sparse rows O(K n nnz)."""
        K, q = self.precision.shape[1], self.B.shape[1]
        prior, explained = self.prior.variances, np.empty((K, q))
        columns = self.B.tocsc() if sp.issparse(self.B) else self.B
        for own, inner in zip(explained, self.latents.inverse_totals(), strict=True):
            for some in gaussian.row_blocks(q, len(inner)):
                block = columns[:, some]
                product = (block.T @ inner).T
                product = block.multiply(product) if sp.issparse(block) else block * product
                own[some] = np.asarray(product.sum(axis=0)).ravel()
        return gaussian.positive_variance(prior - prior**2 * explained, np.tile(prior, (K, 1)))

    def rows(self, B):
        """Return the covariances (n, K, K) of the predictors of rows."""
        prior, K = self.prior.row_variance(B), self.precision.shape[1]
        out = np.empty((B.shape[0], K, K))
        for rows in gaussian.row_blocks(B.shape[0], len(self.precision)):
            out[rows] = self.latents.blocks(prior[rows], self.prior.covariance(self.B, B[rows]))
        return out

    def weights_with(self, B, c, j):
        """Return the covariance (q, n) of the weights of class c with class j at rows."""
        inner = self.latents.weights_with(self.prior.covariance(self.B, B), c, j)
        prior = (B.toarray() if sp.issparse(B) else B).T if c == j else 0.0
        return self.prior.solve(prior + np.asarray(self.B.T @ inner))

    def draw(self, n_samples, rng):
        """Return draws (K, n_samples, q) of the weights about their means.

        Draws of the prior, less what they would make of the predictors: given the common offsets of
        rows the classes are independent, and one vector of offsets is common to them.
        """
        known, n = self.latents, len(self.precision)
        level = known.offset.T @ rng.standard_normal((n, n_samples))
        draws = []
        for E, d in zip(known.explained, known.precision.T, strict=True):
            weights = self.prior.draw(n_samples, rng)
            noise = rng.standard_normal((n, n_samples)) / np.sqrt(d)[:, None]
            pull = np.asarray(self.B.T @ (E @ (level - self.B @ weights.T - noise)))
            draws.append(weights + self.prior.solve(pull).T)
        return np.array(draws)


class PredictorState(NamedTuple):
    """What EP asks of a posterior at the rows, and means (K, q) and spread of the weights.

    `dof` (K,) are the effective numbers of weights that the rows tell.
    """

    mean: np.ndarray
    cov: np.ndarray
    log_evidence: float
    coef: np.ndarray
    spread: Any
    dof: np.ndarray
    extra_var: float = 0.0


class ClassPredictors:
    """Structure of the predictors of all classes at the rows of a `Design`.

    `prior` (q,) are the prior precisions, `by_rows` says which matrices are factorised.
    """

    def __init__(self, design, prior, by_rows):
        self.B, self.variances, self.by_rows = design.B, 1.0 / prior, by_rows
        if by_rows:
            kernel = design.kernel(DiagonalCovariance(self.variances))
            self.posteriors: Any = class_structures.ClassLatents(kernel)
        else:
            self.posteriors = class_structures.ClassWeights(design.B, prior)

    def posterior(self, precision, shift):
        """Return the `PredictorState` for sites (n, K), copies of tied rows counted."""
        state = self.posteriors.posterior(precision, shift)
        if self.by_rows:
            coef = self.variances * np.asarray(self.B.T @ state.alpha).T
            spread: Any = SpreadByRows(self.B, self.variances, precision)
            spread.latents = state.spread
        else:
            coef, spread = state.coef, ClassSpread(state.spread)
        dof = np.einsum("ncj,njc->c", stars(precision), state.cov)
        return PredictorState(state.mean, state.cov, state.log_evidence, coef, spread, dof)
