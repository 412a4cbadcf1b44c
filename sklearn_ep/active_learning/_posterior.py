"""The Gaussian posterior of a pool that takes labels in by rank-one updates.

A label of row i is a site with gradient a and negative curvature b of its log probability in the
latent mean. With d the covariances of row i with all rows, means move by a d and covariances by
-b d d': no matrix of the pool with itself is needed, nor a refit.
"""

import copy
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.special import ndtri_exp
from sklearn.base import is_regressor
from sklearn.utils.extmath import safe_sparse_dot

from .._engine.gaussian import positive_variance, row_blocks
from .._engine.likelihoods import PROBIT_SLOPE, Probit
from .._estimator.pipelines import last_step, rows_at_last_step
from .._estimator.posterior_classifier import PosteriorClassifier
from .._estimator.tables import row_at, rows_at
from ._links import ClassResponse, NormalResponse, calibration_of, response_of
from ._rows import rows_of

# Entries of one block of covariances: small enough for what is computed from it to stay in cache.
_BLOCK = 100_000
# Largest dense copy of sparse reference rows: products with it take a third of the time.
_KEPT = 4_000_000


class Posterior:
    """Latent means and variances of pool rows, one column a binary problem.

    Parameters
    ----------
    source : object
        `checked(X)` -> rows as the two other methods take them: `moments(X)` -> mean and variance
        (n, K), and `covariance_with(X2)` -> map from rows X1 to covariances (K, n1, n2).
    response : ClassResponse or NormalResponse
        What a label says of a latent value.
    X : ndarray, CSR matrix or table of shape (n, d)
    reference : like X, of shape (m, d), or None, default=None
        Rows at which predictions count.
    """

    def __init__(self, source, response, X, reference=None):
        # checked once: every label asks for covariances with the whole pool
        self.source, self.response, self.X = source, response, source.checked(X)
        self.reference = None if reference is None else source.checked(reference)
        self.mean, self.var = source.moments(self.X)
        self._directions: tuple[Any, ...] = ()
        self._cross: Any = None
        if reference is not None:
            self.reference_mean, self.reference_var = source.moments(self.reference)

    def proba(self, rows=slice(None)):
        """Return class probabilities (n, n_classes) at the present state."""
        return self.response.proba(self.mean[rows], self.var[rows])

    def reference_proba(self):
        """Return class probabilities (m, n_classes) of the reference rows."""
        return self.response.proba(self.reference_mean, self.reference_var)

    def cross(self, rows):
        """Yield (slice of rows, covariances (K, block, m) with the reference rows)."""
        # covariances in larger blocks than what follows from them: sources that keep nothing of
        # the reference rows compute what they need of them anew for each
        m = len(self.reference_mean)
        of_rows: Any = None
        if not self._directions:
            of_rows = self.source.covariance_with(self.reference)
        for outer in row_blocks(len(rows), m, 8 * _BLOCK):
            part = rows[outer]
            C = self._with_labels()[:, part] if of_rows is None else of_rows(rows_at(self.X, part))
            for inner in row_blocks(len(part), m, _BLOCK):
                yield slice(outer.start + inner.start, outer.start + inner.stop), C[:, inner]

    def _with_labels(self):
        """Return covariances (K, n, m) with the reference rows, all labels in; kept once asked."""
        if self._cross is None:
            of_rows, rows = self.source.covariance_with(self.reference), np.arange(len(self.mean))
            blocks = row_blocks(len(rows), len(self.reference_mean), 8 * _BLOCK)
            each = [of_rows(rows_at(self.X, rows[block])) for block in blocks]
            self._cross = np.concatenate(each, axis=1)
            for d, d_reference, curvature in self._directions:
                self._cross = self._cross - _product(d, d_reference, curvature)
        return self._cross

    def explained(self):
        """Return the mean squared covariance with the reference rows, (n, K)."""
        blocks = self.cross(np.arange(len(self.mean)))
        return np.concatenate([np.mean(C**2, axis=2).T for _, C in blocks])

    def including(self, i, label=None):
        """Return the posterior with a label of row i; None is a label that is not known yet.

        One column of covariances, and n m flops a problem once scores have looked ahead.
        """
        of_rows, new = self.source.covariance_with(row_at(self.X, i)), copy.copy(self)
        d, d_reference = of_rows(self.X)[:, :, 0].T, None
        if self.reference is not None:
            d_reference = of_rows(self.reference)[:, :, 0].T
        for g, g_reference, curvature in self._directions:
            d = d - curvature * g[i] * g
            if d_reference is not None:
                d_reference = d_reference - curvature * g[i] * g_reference
        a, b = (s[0] for s in self.response.site(label, self.mean[[i]], self.var[[i]]))
        new._directions = (*self._directions, (d, d_reference, b))
        new.mean, new.var = self.mean + a * d, positive_variance(self.var - b * d**2, self.var)
        if d_reference is not None:
            if self._cross is not None:
                new._cross = self._cross - _product(d, d_reference, b)
            new.reference_mean = self.reference_mean + a * d_reference
            left = self.reference_var - b * d_reference**2
            new.reference_var = positive_variance(left, self.reference_var)
        return new


def _product(d, d_reference, curvature):
    """Return by how much a label lowers covariances (K, n, m), from those with its row."""
    return (curvature * d).T[:, :, None] * d_reference.T[:, None, :]


class _SeparateProblems:
    """Latent values as an estimator tells them: one column, or one a one-versus-rest problem."""

    def __init__(self, estimator):
        self.estimator = estimator

    def checked(self, X):
        """Return rows as they are."""
        return X

    def moments(self, X):
        """Return latent means and variances (n, K)."""
        return _in_columns(*self.estimator.latent_mean_and_variance(X))

    def covariance_with(self, X2):
        return lambda X1: _in_matrices(self.estimator.latent_covariance(X1, X2))


def _in_columns(*values):
    return tuple(np.asarray(a, dtype=float).reshape(len(a), -1) for a in values)


def _in_matrices(C):
    C = np.asarray(C, dtype=float)
    return C.reshape((-1, *C.shape[-2:]))


class _OwnProblems:
    """The same of an estimator of this package, past the checks of its public methods."""

    def __init__(self, estimator):
        self.checked, self.latents = estimator._check_new, estimator._latents()

    def moments(self, X):
        return _in_columns(*self.latents.mean_and_variance(X))

    def covariance_with(self, X2):
        of_rows = self.latents.covariance_with(X2)  # what X2 alone decides is worked out once
        return lambda X1: _in_matrices(of_rows(X1))


class _Uncalibrated:
    """Latent values of a source as they are before a calibration.

    Labels are included here, since it is the posterior that they tell of; a refit finds a
    calibration of its own.
    """

    def __init__(self, source, slope, temper):
        self.source, self.slope, self.spread = source, slope, slope**2 * temper
        self.checked = source.checked

    def moments(self, X):
        mean, var = self.source.moments(X)
        return mean / self.slope, var / self.spread

    def covariance_with(self, X2):
        of_rows = self.source.covariance_with(X2)
        return lambda X1: of_rows(X1) / self.spread[:, None, None]


class _JointClasses:
    """Each class against the rest, out of a joint posterior of the latent values of all classes.

    Labels say nothing of the mean of the latent values over the classes, which keeps its prior
    covariance k / K and is independent of all contrasts: it is taken out. What is left is put in
    units of the noise between two classes, and means are such that a probit gives the probability
    that the joint posterior gives the class.
    """

    def __init__(self, estimator):
        self.estimator, self.checked = estimator, estimator._check_new
        self.latents = estimator._latents()
        K = len(estimator.classes_)
        noise = estimator.latent_links()[0]
        sd = np.sqrt(2.0) if isinstance(noise, Probit) else PROBIT_SLOPE
        self.scale = K / ((K - 1.0) * sd)

    def moments(self, X):
        var, log_proba = self.latents.variance_and_log_proba(X)
        var = self.scale**2 * var
        # a probability of one has no finite mean: the last double below it
        log_proba = np.minimum(log_proba, -np.finfo(float).epsneg)
        return np.sqrt(1.0 + var) * ndtri_exp(log_proba), var

    def covariance_with(self, X2):
        of_rows = self.latents.covariance_with(X2)
        prior = _prior_covariance_with(self.estimator, X2)

        def covariance(X1):
            C = of_rows(X1)
            C -= prior(X1) / len(C)
            C *= self.scale**2
            return C

        return covariance


def _prior_covariance_with(estimator, X2):
    """Return the map from rows X1 to the prior covariance (n1, n2) of each class of a joint one."""
    if hasattr(estimator, "kernel_"):
        # each node keeps the common level of the classes at its own prior: the mixture has the mean
        kernels = [estimator.kernel_.clone_with_theta(theta) for theta in estimator.hyper_theta_]
        nodes = list(zip(estimator.hyper_weights_, kernels, strict=True))
        return lambda X1: sum(w * kernel(X1, X2) for w, kernel in nodes)
    slope, temper = calibration_of(estimator)
    tempering = float(slope[0] ** 2 * temper[0])
    variances = tempering * np.broadcast_to(estimator.prior_variance_, estimator.n_features_in_)
    level = tempering * estimator.intercept_prior_variance if estimator.fit_intercept else 0.0
    scaled = X2.multiply(variances).tocsr() if sp.issparse(X2) else X2 * variances
    if sp.issparse(scaled) and np.prod(scaled.shape) <= _KEPT:
        scaled = scaled.toarray()
    scaled = scaled.T.tocsr() if sp.issparse(scaled) else np.ascontiguousarray(scaled.T)
    return lambda X1: safe_sparse_dot(X1, scaled, dense_output=True) + level


class _Responses(_SeparateProblems):
    """Predictions of a regressor, noise included, which is what a label lowers the variance of."""

    def moments(self, X):
        mean, std = _in_columns(*self.estimator.predict(X, return_std=True))
        return mean, std**2


def posterior_of(estimator, X, reference=None):
    """Return the `Posterior` of a fitted estimator, or the last step of one, at rows of a pool."""
    X = rows_of(rows_at_last_step(estimator, X))
    if reference is not None:
        reference = rows_of(rows_at_last_step(estimator, reference))
    estimator = last_step(estimator)
    if is_regressor(estimator):
        return Posterior(_Responses(estimator), NormalResponse(), X, reference)
    source: Any
    if getattr(estimator, "multi_class_", None) == "joint" and len(estimator.classes_) > 2:
        source, stand_in = _JointClasses(estimator), [Probit()] * len(estimator.classes_)
        response = ClassResponse(stand_in, stand_in, *calibration_of(estimator))
    else:
        own = isinstance(estimator, PosteriorClassifier)
        source = _OwnProblems(estimator) if own else _SeparateProblems(estimator)
        response = response_of(estimator, X, source)
    if np.any(response.slope != 1.0) or np.any(response.temper != 1.0):
        source = _Uncalibrated(source, response.slope, response.temper)
    return Posterior(source, response, X, reference)
