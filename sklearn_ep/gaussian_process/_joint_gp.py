"""Gaussian processes of all classes under one kernel, joined by the sites of `_engine.class_sites`.

Given a common offset of the classes for each row, which the sites leave open, the classes are
independent: one n x n factorisation a class, as for two classes, and one more for the offsets. With
D_c the precisions of class c, E_c = (K + D_c^-1)^-1 and M = chol(sum_c E_c); the softmax has the
same algebra (Rasmussen and Williams 2006, section 3.5).
"""

from functools import cached_property

import numpy as np
from sklearn.utils import gen_batches

from .._engine.class_sites import star_times
from .._engine.gaussian import (
    WEAK_SITE,
    add_to_diagonal,
    checked_cholesky,
    inverse_from_triangular,
    jittered_cholesky,
    lower_times,
    triangular_inverse,
)
from ._dense_gp import KernelGP

__all__ = ["ClassCovariance", "JointGP", "JointGPPosterior", "JointState"]

# Rows up to which single precision would save no time that counts.
_FEW_ROWS = 150
# Numbers of one kind that blocks of rows may take at once.
_ENTRIES = 20_000_000


class ClassCovariance:
    """Posterior covariance of all classes at any rows, given the sites of the training rows.

    `explained` (K, n, n) holds the E_c and `offset` (n, n) the lower M^-1. For prior covariances k
    (n, m) with the training rows, class c has covariance k** - k'E_c k + Q_c'Q_c and covariance
    Q_c'Q_j with class j, where Q_c = M^-1 E_c k.
    """

    def __init__(self, explained, offset):
        self.explained, self.offset = explained, offset

    def halves(self, c, k):
        """Return E_c k and Q_c for prior covariances k (n, m)."""
        P = self.explained[c] @ k
        return P, lower_times(self.offset, P.copy())

    def blocks(self, prior, cross, gain):
        """Return the covariances (m, K, K) of rows with prior variances (m,), in blocks of rows.

        `cross(rows)` gives the prior covariances (n, k) of a block with the training rows, and
        `gain(c, rows)` the product E_c cross(rows), to which there may be a cheaper way.
        """
        C, n = len(self.explained), len(self.offset)
        cov = np.empty((C, C, len(prior)))
        for rows in gen_batches(len(prior), max(1, _ENTRIES // (C * n))):
            k, halves = cross(rows), []
            for c in range(C):
                P = gain(c, rows)
                own = prior[rows] - np.einsum("im,im->m", k, P)
                halves.append(lower_times(self.offset, P))
                for j, half in enumerate(halves):
                    cov[c, j, rows] = cov[j, c, rows] = np.einsum("im,im->m", halves[c], half)
                cov[c, c, rows] += own
        return np.ascontiguousarray(cov.transpose(2, 0, 1))


class JointState:
    """Posterior of the latent values of all classes given sites d, b (n, K), copies counted.

    `mean` (n, K) and `cov` (n, K, K) are the marginals of the rows; `precision` (n, K) is that of
    the sites, `alpha` (n, K) K^-1 mean, `spread` the `ClassCovariance`; `log_evidence` is the log
    of the integral of prior times sites, `extra_var` 0: the sites are on the latent values
    themselves.
    """

    extra_var = 0.0

    def __init__(self, K, precision, shift):
        self.precision = precision
        self.spread, log_det = _spread(K, precision)
        explained = self.spread.explained
        self.mean = self._mean(K, precision, shift)
        self.alpha = shift - star_times(precision, self.mean)
        self.cov = self.spread.blocks(
            np.diagonal(K),
            lambda rows: K[:, rows],
            lambda c, rows: _gain(explained[c], K, precision[:, c], rows),
        )
        self.log_evidence = 0.5 * float(np.sum(shift * self.mean)) - log_det

    def _mean(self, K, precision, shift):
        explained, offset = self.spread.explained, self.spread.offset
        Kb = K @ shift
        x = Kb - K @ np.column_stack([E @ k for E, k in zip(explained, Kb.T, strict=True)])
        level = offset.T @ (offset @ np.sum(precision * x, axis=1))
        return x + K @ np.column_stack([E @ level for E in explained])

    def evidence_curvature(self):
        """Return R with d log evidence = sum(R * dK) / 2 at a fixed point of the sites, (n, n).

        Exact for two classes. For more the sites are a curved family, and what the evidence owes to
        their moves is left out: of six classes with 300 rows five nats a unit of a log parameter,
        and over twenty at a variance of 1000.
        """
        R = self.alpha @ self.alpha.T
        for E in self.spread.explained:
            R -= E
            half = lower_times(self.spread.offset, E.copy())
            R += half.T @ half
        return R

    def inverse_total(self, c):
        """Return the block (n, n) of class c of the inverse of prior covariance plus sites'."""
        half = lower_times(self.spread.offset, self.spread.explained[c].copy())
        return self.spread.explained[c] - half.T @ half


def _spread(K, precision):
    """Return the `ClassCovariance` of sites with precisions (n, K), and half a log determinant.

    The latter is that of prior covariance times sites plus the identity.
    """
    n, C = precision.shape
    explained, log_det = np.empty((C, n, n)), 0.0
    for c in range(C):
        log_det += _explained(K, precision[:, c], explained[c])
    M = checked_cholesky(explained.sum(0))
    log_det += np.sum(np.log(np.diagonal(M))) - 0.5 * np.sum(np.log(precision.sum(1)))
    return ClassCovariance(explained, triangular_inverse(M)), log_det


def _explained(K, precision, out):
    """Write (K + diag(precision)^-1)^-1 into `out`; return log |I + K diag(precision)| / 2."""
    root = np.sqrt(precision)
    B = root[:, None] * K
    B *= root
    add_to_diagonal(B, 1.0)
    lower = checked_cholesky(B)
    out[:] = inverse_from_triangular(triangular_inverse(lower) * root)
    return float(np.sum(np.log(np.diagonal(lower))))


def _gain(E, K, precision, rows):
    """Return E K[:, rows] by E K = I - E D^-1, which needs no product where a site is strong."""
    tau = precision[rows]
    strong = tau * np.diagonal(K)[rows] >= WEAK_SITE
    P = E[:, rows] / -np.where(strong, tau, 1.0)
    own = np.arange(rows.start, rows.stop)
    P[own, np.arange(len(own))] += 1.0
    if not np.all(strong):
        weak = np.flatnonzero(~strong)
        P[:, weak] = E @ K[:, own[weak]]
    return P


class JointGP(KernelGP):
    """Structure of one Gaussian process prior a class, all with the same kernel over rows X (n, d).

    A posterior costs 2 n^3 flops a class and K + 3 arrays of n^2 numbers.
    """

    def posterior(self, precision, shift):
        """Return the `JointState` for site parameters (n, K), copies of tied rows counted."""
        return JointState(self.K, precision, shift)

    def expected_curvature(self, state, together=False):
        """Return the expected curvature (p, p) of the log evidence in theta, as with two classes.

        Blocks between classes are left out, and those of classes count K / (K - 1) times: right
        where all classes are alike, which makes the others 1 / (K - 1) of each.
        """
        K = len(state.spread.explained)
        kind = np.float64 if len(self.X) <= _FEW_ROWS else np.float32
        own = (self._curvature_of(state.inverse_total(c), together, kind) for c in range(K))
        return K / (K - 1.0) * sum(own)


class JointGPPosterior:
    """Predictions of all classes from a `JointState` of training rows X."""

    def __init__(self, kernel, X, state, factor):
        self.kernel, self.X, self.factor = kernel, X, factor
        self.alpha, self.precision = state.alpha, state.precision

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "spread"}

    @cached_property
    def spread(self):
        """The `ClassCovariance` of the sites.

        Found at first use from what is kept, hence alike before and after a pickle; O(K n^3).
        """
        return _spread(self.kernel(self.X), self.precision)[0]

    @property
    def n_classes(self):
        """Number of classes."""
        return self.alpha.shape[1]

    def latent_mean(self, X):
        """Return means (n_new, K) of the classes at new rows."""
        return self.kernel(X, self.X) @ self.alpha

    def latent(self, X):
        """Return means (n_new, K) and covariances (n_new, K, K) of the classes at new rows."""
        k = self.kernel(self.X, X)
        cov = self.spread.blocks(
            self.kernel.diag(X),
            lambda rows: k[:, rows],
            lambda c, rows: self.spread.explained[c] @ k[:, rows],
        )
        return k.T @ self.alpha, cov

    def covariance(self, X1, X2, c, j):
        """Return the posterior covariance (n1, n2) of classes c and j between new rows."""
        k1, k2 = self.kernel(self.X, X1), self.kernel(self.X, X2)
        P, Q1 = self.spread.halves(c, k1)
        shared = Q1.T @ self.spread.halves(j, k2)[1]
        return shared + self.kernel(X1, X2) - P.T @ k2 if c == j else shared

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new, K) of all classes at new rows.

        Given the offsets the classes are independent; one vector of offsets is common to them.
        """
        k, prior = self.kernel(self.X, X), self.kernel(X)
        draws = np.empty((n_samples, len(X), self.n_classes))
        shared = rng.standard_normal((n_samples, len(k)))
        for c in range(self.n_classes):
            P, Q = self.spread.halves(c, k)
            lower = jittered_cholesky(prior - k.T @ P, 1e-10, largest=1e-6)[0]
            own = rng.standard_normal((n_samples, len(X))) @ lower.T
            draws[:, :, c] = k.T @ self.alpha[:, c] + own + shared @ Q
        return draws
