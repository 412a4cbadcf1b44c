"""All classes jointly through inducing points: one precision matrix of K m columns.

The classes share points and kernel, hence the whitened rows W of `values`; the sites of
`_engine.classes` sit on the projected values W e_c and join the classes. All rows are in memory.
"""

import numpy as np
from sklearn.utils import gen_batches

from ..._engine.classes import star_times
from ..._engine.gaussian import (
    add_to_diagonal,
    checked_cholesky,
    inverse_from_cholesky,
    triangular_inverse,
)
from .values import InducingPrior, block_rows

__all__ = ["MOST_COLUMNS", "JointInducingGP", "JointInducingPosterior", "JointInducingState"]

# Classes times inducing points up to which the joint precision matrix is factorised.
MOST_COLUMNS = 4000


class JointInducingState:
    """Posterior of the whitened inducing values of all classes given sites d, b (n, K).

    `coef` (K, m) are their means, `inverse` the lower L^-1 with L L' = A, the precision, and
    `spread` A^-1 as (K, m, K, m); `mean` (n, K) and `cov` (n, K, K) are the marginals of the
    projected values, `extra_var` (n,) the variances of the latent values given these.
    """

    def __init__(self, W, extra_var, precision, shift):
        m, C = W.shape[1], precision.shape[1]
        self.precision, self.shift, self.extra_var = precision, shift, extra_var
        share = precision / precision.sum(1, keepdims=True)
        A = np.zeros((C, m, C, m))
        for c in range(C):
            for j in range(c + 1):
                weight = -precision[:, c] * share[:, j] + (precision[:, c] if c == j else 0.0)
                A[c, :, j] = W.T @ (weight[:, None] * W)
                A[j, :, c] = A[c, :, j].T
        A = A.reshape(C * m, C * m)
        add_to_diagonal(A, 1.0)
        lower = checked_cholesky(A)
        self.inverse = triangular_inverse(lower)
        self.spread = inverse_from_cholesky(lower).reshape(C, m, C, m)
        pull = shift.T @ W
        self.coef = (self.spread.reshape(C * m, C * m) @ pull.ravel()).reshape(C, m)
        self.mean = W @ self.coef.T
        self.cov = row_covariances(self.spread, W)
        self.log_evidence = 0.5 * float(np.sum(pull * self.coef))
        self.log_evidence -= float(np.sum(np.log(np.diagonal(lower))))


def row_covariances(spread, W):
    """Return w_i' A^-1[c, j] w_i of each row as (n, K, K)."""
    C = len(spread)
    cov = np.empty((len(W), C, C))
    for c in range(C):
        for j in range(c + 1):
            cov[:, c, j] = cov[:, j, c] = np.einsum("im,im->i", W @ spread[c, :, j], W)
    return cov


class JointInducingGP:
    """Structure of one Gaussian process a class at rows X, seen through points Z (FITC).

    A posterior costs n m^2 K (K + 1) multiplications and (K m)^3 / 3, memory n m + 2 (K m)^2
    numbers.
    """

    def __init__(self, kernel, X, Z, jitter):
        self.X, self.prior = X, InducingPrior(kernel, Z, jitter)
        self.W, self.extra_var, self._kept = self.prior.whiten(X, keep=True)

    def posterior(self, precision, shift):
        """Return the `JointInducingState` for sites (n, K), copies of tied rows counted."""
        return JointInducingState(self.W, self.extra_var, precision, shift)

    def evidence_gradient(self, state, noise_slope):
        """Return d log evidence / d theta (p,) at a fixed point of the sites, the points kept.

        `noise_slope` (n,) are the derivatives of the log evidence in the extra variances. As for
        dense sites of several classes the gradient is close, not exact.
        """
        W, C = self.W, state.precision.shape[1]
        scaled = noise_slope[:, None] * W
        alpha = state.shift - star_times(state.precision, state.mean)
        towards_w = alpha @ state.coef
        M = W.T @ scaled
        for c in range(C):
            smoothed = np.stack([W @ state.spread[j, :, c] for j in range(C)], axis=1)
            share = (state.precision / state.precision.sum(1, keepdims=True))[:, :, None]
            common = np.sum(share * smoothed, axis=1)
            towards_w -= state.precision[:, c : c + 1] * (smoothed[:, c] - common)
            M -= 0.5 * (state.spread[c, :, c] + np.outer(state.coef[c], state.coef[c]))
        add_to_diagonal(M, 0.5 * C)
        G = (towards_w - 2.0 * scaled) @ self.prior.inverse
        theta, _ = self.prior.cross.contract(self._kept, G, False)
        diagonal = self.prior.cross.contract_diagonal(self.X, noise_slope)
        return theta + diagonal + self.prior.contract(M, False)[0]


class JointInducingPosterior:
    """Predictions of all classes from inducing points."""

    def __init__(self, prior, state, factor):
        self.prior, self.factor = prior, factor
        self.coef, self.spread, self.inverse = state.coef, state.spread, state.inverse

    @property
    def n_classes(self):
        """Number of classes."""
        return len(self.coef)

    @property
    def inducing_mean(self):
        """Posterior means of the inducing values (K, m)."""
        return self.coef @ self.prior.lower.T

    @property
    def inducing_cov(self):
        """Posterior covariances of the inducing values of each class (K, m, m)."""
        lower = self.prior.lower
        return np.stack([lower @ S[:, c] @ lower.T for c, S in enumerate(self.spread)])

    def latent(self, X):
        """Return means (n_new, K) and covariances (n_new, K, K) of the classes at new rows."""
        C = self.n_classes
        mean, cov = np.empty((len(X), C)), np.empty((len(X), C, C))
        for rows in gen_batches(len(X), block_rows(len(self.prior.Z))):
            W, extra_var, _ = self.prior.whiten(X[rows])
            mean[rows] = W @ self.coef.T
            block = row_covariances(self.spread, W)
            np.einsum("ncc->nc", block)[:] += extra_var[:, None]
            cov[rows] = block
        return mean, cov

    def covariance(self, X1, X2, c, j):
        """Return the posterior covariance (n1, n2) of classes c and j between new rows."""
        W1, W2 = self.prior.whiten(X1)[0], self.prior.whiten(X2)[0]
        shared = W1 @ self.spread[c, :, j] @ W2.T
        return shared + self.prior.kernel(X1, X2) - W1 @ W2.T if c == j else shared

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new, K): common inducing values, the rest a class."""
        W = self.prior.whiten(X)[0]
        left = self.prior.kernel(X) - W @ W.T
        add_to_diagonal(left, 1e-10 * (1.0 + np.diagonal(left).max()))
        lower = checked_cholesky(left)
        e = (rng.standard_normal((n_samples, len(self.inverse))) @ self.inverse).reshape(
            n_samples, *self.coef.shape
        )
        own = rng.standard_normal((n_samples, self.n_classes, len(X))) @ lower.T
        return ((self.coef + e) @ W.T + own).transpose(0, 2, 1)
