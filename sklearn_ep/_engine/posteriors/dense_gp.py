"""Gaussian process with a site on every row: the full covariance matrix.

Notation of Rasmussen and Williams (2006), chapter 3: with S = sqrt(site precisions) the only matrix
that is ever factorised is B = I + S K S, whose eigenvalues are at least one.
"""

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from sklearn.utils import gen_batches

from ..gaussian import checked_cholesky, inverse_from_cholesky, triangular_inverse
from ..kernels import contract, cross

__all__ = [
    "DenseGP",
    "DenseGPPosterior",
    "DenseState",
    "positive_variance",
    "sequential_sweep",
    "site_marginal_variances",
]

# Below this product of site precision and prior variance the difference 1 - (B^-1)_ii has lost the
# digits that the direct formula keeps.
_WEAK_SITE = 1e-4


class DenseState:
    """Posterior of the latent values given all sites.

    Attributes
    ----------
    mean, var : ndarray of shape (n,)
        Marginals.
    extra_var : float
        0: the sites are on the latent values themselves.
    alpha : ndarray of shape (n,)
        K^-1 mean, computed without K^-1.
    root : ndarray of shape (n,)
        Square roots of the site precisions.
    lower : ndarray of shape (n, n)
        Cholesky factor of B.
    log_evidence : float
        log of the integral of prior times sites.
    """

    extra_var = 0.0

    def __init__(self, K, precision, shift):
        self.root = root = np.sqrt(precision)
        B = root[:, None] * K
        B *= root
        B[np.diag_indices_from(B)] += 1.0
        self.lower = lower = checked_cholesky(B)
        solved = cho_solve((lower, True), root * (K @ shift), check_finite=False)
        self.alpha = shift - root * solved
        self.mean = K @ self.alpha
        self.var = site_marginal_variances(K, precision, root, lower)
        log_det = np.sum(np.log(np.diagonal(lower)))
        self.log_evidence = 0.5 * shift @ self.mean - log_det

    def evidence_curvature(self):
        """Return R with d log evidence = sum(R * dK) / 2 at a fixed point of the sites, (n, n)."""
        R = inverse_from_cholesky(self.lower)
        R *= -self.root[:, None]
        R *= self.root
        R += np.outer(self.alpha, self.alpha)
        return R


def site_marginal_variances(K, precision, root, lower):
    """Return diag((K^-1 + diag(precision))^-1) without K^-1, root and lower as in `DenseState`."""
    inverse = triangular_inverse(lower)
    diagonal = np.diagonal(K)
    strong = precision * diagonal >= _WEAK_SITE
    var = np.empty(len(K))
    norms = np.einsum("ij,ij->j", inverse, inverse)
    var[strong] = (1.0 - norms[strong]) / precision[strong]
    weak = np.flatnonzero(~strong)
    if len(weak):
        half = inverse @ (root[:, None] * K[:, weak])
        var[weak] = diagonal[weak] - np.einsum("ij,ij->j", half, half)
    return var


class DenseGP:
    """Structure of a Gaussian process prior over n latent values.

    Parameters
    ----------
    K : ndarray of shape (n, n)
        Prior covariance.

    Notes
    -----
    A posterior costs 2 n^3 / 3 flops and two arrays of n^2 numbers.
    """

    def __init__(self, K):
        self.K = K

    def posterior(self, precision, shift):
        """Return the `DenseState` for site parameters (n,), copies of tied rows counted."""
        return DenseState(self.K, precision, shift)


def dense_evidence_gradient(kernel, X, state):
    """Return d log evidence / d theta (p,) at a fixed point of the sites."""
    return 0.5 * contract(kernel, X, state.evidence_curvature())


class DenseGPPosterior:
    """Predictions of a fitted dense Gaussian process.

    Parameters
    ----------
    kernel : sklearn kernel
    X : ndarray of shape (n, d)
        Training rows.
    state : DenseState
    """

    block_rows = 2000

    def __init__(self, kernel, X, state):
        self.kernel, self.X = kernel, X
        self.alpha, self.root, self.lower = state.alpha, state.root, state.lower

    def _half(self, K_new):
        """Return C^-1 S K* for cross covariances (n_new, n), shape (n, n_new)."""
        return solve_triangular(
            self.lower, self.root[:, None] * K_new.T, lower=True, check_finite=False
        )

    def latent(self, X):
        """Return mean and variance (n_new,) at new rows; O(n^2) a row, in blocks of rows."""
        mean, var = np.empty(len(X)), self.kernel.diag(X)
        for rows in gen_batches(len(X), self.block_rows):
            K_new = cross(self.kernel, X[rows], self.X)
            mean[rows] = K_new @ self.alpha
            half = self._half(K_new)
            var[rows] -= np.einsum("ij,ij->j", half, half)
        return mean, positive_variance(var, self.kernel.diag(X))

    def covariance(self, X1, X2):
        """Return the posterior covariance (n1, n2) of the latent values at new rows."""
        K1 = cross(self.kernel, X1, self.X)
        half1 = self._half(K1)
        half2 = half1 if X2 is X1 else self._half(cross(self.kernel, X2, self.X))
        prior = self.kernel(X1) if X2 is X1 else cross(self.kernel, X1, X2)
        return prior - half1.T @ half2


def positive_variance(var, prior):
    """Keep variances that rounding made non-positive at the rounding level of the prior variance.

    A posterior variance is positive in exact arithmetic; where prior minus explained variance
    cancels, the nearest defensible value is the unit roundoff times the prior.
    """
    return np.maximum(var, np.finfo(float).eps * prior)


def sequential_sweep(K, factor, y, sites, rule):
    """One sweep of the sequential schedule of the papers: each site is refreshed in turn.

    The reference for the parallel schedule; 2 n^3 flops in n rank-one updates of the covariance.

    Parameters
    ----------
    K : ndarray of shape (n, n)
        Prior covariance.
    factor : Factor
    y : ndarray of shape (n,)
    sites : Sites
    rule : callable
        An update rule of `rules`.

    Returns
    -------
    Sites
        Sites after the sweep.
    """
    precision, shift = sites.precision.copy(), sites.shift.copy()
    solved = np.linalg.solve(np.eye(len(K)) + K * precision, K)
    for i in range(len(K)):
        mean = solved[i] @ shift
        update = rule(
            factor,
            y[i : i + 1],
            type(sites)(precision[i : i + 1], shift[i : i + 1]),
            np.array([mean]),
            solved[i, i : i + 1],
        )
        change = update.sites.precision[0] - precision[i]
        precision[i], shift[i] = update.sites.precision[0], update.sites.shift[0]
        column = solved[:, i].copy()
        solved -= np.outer(column, column) * (change / (1.0 + change * column[i]))
    return type(sites)(precision, shift)
