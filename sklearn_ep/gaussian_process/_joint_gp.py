"""Gaussian processes of all classes under one kernel, joined by the sites of `_engine.class_sites`.

Given a common offset of the classes for each row, which the sites leave open, the classes are
independent: one n x n factorisation a class, as for two classes, and one more for the offsets. With
D_c the precisions of class c, E_c = (K + D_c^-1)^-1 and M = chol(sum_c E_c); the softmax has the
same algebra (Rasmussen and Williams 2006, section 3.5).
"""

from functools import cached_property

import numpy as np
from scipy.linalg import blas
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

    `explained` (K, n, n) holds the E_c, `root` (n, n) the lower M and `offset` M^-1. For prior
    covariances k (n, m) with the training rows, class c has covariance k** - k'E_c k + Q_c'Q_c and
    covariance Q_c'Q_j with class j, where Q_c = M^-1 E_c k.
    """

    def __init__(self, explained):
        self.explained, self.root = explained, checked_cholesky(explained.sum(0))
        self.offset = triangular_inverse(self.root)

    def halves(self, c, k):
        """Return E_c k and Q_c for prior covariances k (n, m)."""
        P = self.explained[c] @ k
        return P, lower_times(self.offset, P.copy())

    def blocks(self, prior, k):
        """Return the covariances (m, K, K) of rows with prior variances (m,), in blocks of rows.

        `k` (n, m) are their prior covariances with the training rows.
        """
        C, n = len(self.explained), len(self.offset)
        cov = np.empty((C, C, len(prior)))
        for rows in gen_batches(len(prior), max(1, _ENTRIES // (C * n))):
            halves: list[np.ndarray] = []
            block = k[:, rows]
            for c in range(C):
                P, half = self.halves(c, block)
                own = prior[rows] - np.einsum("im,im->m", block, P)
                _add_class(cov[:, :, rows], c, halves, half, own)
        return np.ascontiguousarray(cov.transpose(2, 0, 1))

    def offset_parts(self):
        """Yield M^-1 E_c of each class, which add up to M', so that the last takes no product.

        An array that is yielded may be written to.
        """
        left = self.root.T.copy()
        for E in self.explained[:-1]:
            part = lower_times(self.offset, E.copy())
            left -= part
            yield part
        yield left

    def own_blocks(self, K, precision):
        """Return the same as `blocks` for the rows of the sites themselves, of covariance K (n, n).

        With D_c the precisions of class c, E_c K = I - E_c D_c^-1: a product is needed only for
        rows whose site is weak.
        """
        C, n = precision.shape[1], len(K)
        cov, halves = np.empty((C, C, n)), list[np.ndarray]()
        for c, part in enumerate(self.offset_parts()):
            E, tau = self.explained[c], precision[:, c]
            strong = tau * np.diagonal(K) >= WEAK_SITE
            share = 1.0 / np.where(strong, tau, 1.0)
            own = share * (1.0 - share * np.diagonal(E))
            weak = np.flatnonzero(~strong)
            columns = K[:, weak]
            explained = np.einsum("im,im->m", columns, E @ columns) if len(weak) else 0.0
            own[weak] = np.diagonal(K)[weak] - explained
            behind = part @ columns if len(weak) else 0.0
            part *= -share
            part += self.offset
            part[:, weak] = behind
            _add_class(cov, c, halves, part, own)
        return np.ascontiguousarray(cov.transpose(2, 0, 1))


def _add_class(cov, c, halves, half, own):
    """Write the covariances (K, K, m) of class c with itself and those before it.

    `halves` are the Q_j of the latter, to which that of class c is added, and `own` (m,) is what
    class c has beside it.
    """
    halves.append(half)
    for j, other in enumerate(halves):
        cov[c, j] = cov[j, c] = np.einsum("im,im->m", half, other)
    cov[c, c] += own


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
        self.mean = self._mean(K, precision, shift)
        self.alpha = shift - star_times(precision, self.mean)
        self.cov = self.spread.own_blocks(K, precision)
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
        for E, part in zip(self.spread.explained, self.spread.offset_parts(), strict=True):
            R -= E
            R += _gram(part)
        return R

    def inverse_totals(self):
        """Yield the block (n, n) of each class of the inverse of prior covariance plus sites'."""
        for E, part in zip(self.spread.explained, self.spread.offset_parts(), strict=True):
            yield E - _gram(part)


def _gram(A):
    """Return A' A, by a product of half the flops of a general one."""
    lower = blas.dsyrk(
        1.0, A.T if A.flags.c_contiguous else A, trans=not A.flags.c_contiguous, lower=1
    )
    full = lower + lower.T
    np.einsum("ii->i", full)[...] *= 0.5
    return full


def _spread(K, precision):
    """Return the `ClassCovariance` of sites with precisions (n, K), and half a log determinant.

    The latter is that of prior covariance times sites plus the identity.
    """
    n, C = precision.shape
    explained, log_det = np.empty((C, n, n)), 0.0
    for c in range(C):
        log_det += _explained(K, precision[:, c], explained[c])
    spread = ClassCovariance(explained)
    log_det += np.sum(np.log(np.diagonal(spread.root))) - 0.5 * np.sum(np.log(precision.sum(1)))
    return spread, log_det


def _explained(K, precision, out):
    """Write (K + diag(precision)^-1)^-1 into `out`; return log |I + K diag(precision)| / 2."""
    root = np.sqrt(precision)
    B = root[:, None] * K
    B *= root
    add_to_diagonal(B, 1.0)
    lower = checked_cholesky(B)
    out[:] = inverse_from_triangular(triangular_inverse(lower) * root)
    return float(np.sum(np.log(np.diagonal(lower))))


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
        own = (self._curvature_of(B, together, kind) for B in state.inverse_totals())
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
        return k.T @ self.alpha, self.spread.blocks(self.kernel.diag(X), k)

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
