"""Gaussian processes of all classes under one kernel, joined by the sites of `_engine.class_sites`.

Given a common offset of the classes for each row, which the sites leave open, the classes are
independent: one n x n factorisation a class, as for two classes, and one more for the offsets. With
D_c the precisions of class c, E_c = (K + D_c^-1)^-1 and M = chol(sum_c E_c); the softmax has the
same algebra (Rasmussen and Williams 2006, section 3.5).
"""

from functools import cached_property, partial
from typing import Any

import numpy as np
from scipy.linalg import blas
from scipy.sparse.linalg import LinearOperator, gcrotmk

from .._engine import gaussian
from .._engine.class_sites import star_times
from ._dense_gp import KernelGP, least_precision, log_diagonal
from ._kernels import covariances
from ._limits import LIMITS


def _stack(count, n, kind):
    """Return an array (count, n, n) of a float type, each matrix in the order of LAPACK."""
    return np.empty((count, n, n), kind).transpose(0, 2, 1)


class ClassCovariance:
    """Posterior covariance of all classes at any rows, given the sites of the training rows.

    `explained` (K, n, n) holds the E_c, `level` (n, n) the lower M and `offset` M^-1. For prior
    covariances k (n, m) with the training rows, class c has covariance k** - k'E_c k + Q_c'Q_c and
    covariance Q_c'Q_j with class j, where Q_c = M^-1 E_c k.

    Found for a prior covariance K (n, n), in its precision, and site precisions (n, K). `log_det`
    is half the log determinant of prior covariance times sites plus the identity.
    """

    def __init__(self, K, precision):
        n, n_classes = precision.shape
        least = least_precision(K.dtype, np.diagonal(K).max(initial=0.0))
        precision = np.where(np.abs(precision) < least, least, precision)
        self.kind, self.single, self.precision = K.dtype.type, K.dtype == np.float32, precision
        self.explained = _stack(n_classes, n, self.kind)
        self.log_det = -0.5 * np.sum(np.log(precision.sum(1)))
        for E, d in zip(self.explained, precision.T, strict=True):
            self.log_det += _explain(K, d, E)
        level = np.sum(self.explained, axis=0, out=_stack(1, n, self.kind)[0])
        self.level = gaussian.checked_cholesky(level, overwrite=True)
        self.log_det += log_diagonal(self.level)
        self.offset = self.level.copy(order="F")
        gaussian.invert_triangular(self.offset)

    def weights(self, Ks, shift):
        """Return K^-1 mean (n, K) for shifts (n, K) of the sites and their product with K."""
        first = self._times_explained(Ks.T)
        level = self.offset.T @ (self.offset @ first.sum(1))
        return shift - first + self._times_explained([level] * len(Ks.T))

    def _times_explained(self, vectors):
        """Return E_c x_c (n, K) of vectors x_c (n,), one a class."""
        vectors = np.asarray(vectors, dtype=self.kind)
        return np.column_stack(list(map(np.dot, self.explained, vectors)))

    def halves(self, c, k):
        """Return E_c k and Q_c for prior covariances k (n, m)."""
        P = self.explained[c] @ k
        return P, gaussian.lower_times(self.offset, P.copy())

    def blocks(self, prior, k, entries=20_000_000):
        """Return the covariances (m, K, K) of rows with prior variances (m,), in blocks of rows.

        A block takes so many `entries` of one kind at once; `k` (n, m) are their prior covariances
        with the training rows.
        """
        C, n = len(self.explained), len(self.offset)
        cov = np.empty((C, C, len(prior)))
        for rows in gaussian.row_blocks(len(prior), C * n, entries):
            halves: list[np.ndarray] = []
            block = k[:, rows]
            for c in range(C):
                P, half = self.halves(c, block)
                halves.append(half)
                for j, other in enumerate(halves):
                    cov[c, j, rows] = cov[j, c, rows] = np.einsum("im,im->m", half, other)
                cov[c, c, rows] += prior[rows] - np.einsum("im,im->m", block, P)
        return np.ascontiguousarray(cov.transpose(2, 0, 1))

    def offset_parts(self):
        """Yield M^-1 E_c of each class, which add up to M', so that the last takes no product."""
        left = self.level.T.copy(order="F")
        for E in self.explained[:-1]:
            part = gaussian.lower_times(self.offset, E.copy(order="F"))
            left -= part
            yield part
        yield left

    def own_blocks(self, K):
        """Return the same as `blocks` for the rows of the sites themselves, of covariance K (n, n).

        With D_c the precisions of class c, E_c K = I - E_c D_c^-1, where each column of E_c has
        the digits of its site however little that says: a product is needed only for the diagonal
        of weak ones, where the difference loses digits.
        """
        n_classes, n = self.precision.T.shape
        halves, prior = _stack(n_classes, n, self.kind), np.diagonal(K)
        own = np.empty((n, n_classes))
        for c, (E, part) in enumerate(zip(self.explained, halves, strict=True)):
            tau = self.precision[:, c].astype(self.kind)
            share = 1.0 / tau
            kept = 1.0 - share * np.diagonal(E)
            weak = np.flatnonzero(np.abs(tau) * prior < 0.1)
            kept[weak] = np.einsum("ij,ij->j", E[:, weak], K[:, weak])
            own[:, c] = share * kept
            np.multiply(E, -share, out=part)
            np.fill_diagonal(part, kept)
            gaussian.lower_times(self.offset, part)
        cov = np.matmul(halves.transpose(2, 0, 1), halves.transpose(2, 1, 0)).astype(np.float64)
        np.einsum("ncc->nc", cov)[:] += own
        return cov


def _explain(K, precision, out):
    """Write (K + diag(precision)^-1)^-1 into `out`; return log |I + K diag(precision)| / 2."""
    scale = np.sqrt(np.maximum(precision, 0.0)).astype(K.dtype)
    np.multiply(scale[:, None], K, out=out.T)
    out *= scale[:, None]
    gaussian.add_to_diagonal(out, 1.0)
    lower = gaussian.checked_cholesky(out, overwrite=True)
    log_det = log_diagonal(lower)
    gaussian.invert_triangular(lower)
    lower *= scale
    gaussian.mirrored(gaussian.triangular_gram(lower))
    return log_det + _explain_less(K, precision, out) if precision.min() < 0 else log_det


def _explain_less(K, precision, explained):
    """Take what negative precisions lack off E (n, n) of the others; return their log determinant.

    With A the covariance that the others leave of these rows and d = sqrt(-precision), half of it
    is that of I - d A d, which is positive definite if the posterior is proper.
    """
    rows = np.flatnonzero(precision < 0)
    root = np.sqrt(-precision[rows])
    left = -explained @ K[:, rows]
    left[rows, np.arange(len(rows))] += 1.0
    B = -root[:, None] * (K[rows] @ left) * root
    gaussian.add_to_diagonal(B, 1.0)
    lower = gaussian.checked_cholesky(B)
    half = gaussian.triangular_solve(lower, (left * root).T).astype(K.dtype, copy=False)
    explained -= half.T @ half
    return log_diagonal(lower)


class JointState:
    """Posterior of the latent values of all classes given sites d, b (n, K), copies counted.

    `mean` (n, K) and `cov` (n, K, K) are the marginals of the rows; `precision` (n, K) is that of
    the sites, `alpha` (n, K) K^-1 mean, `spread` the `ClassCovariance`; `log_evidence` is the log
    of the integral of prior times sites, `extra_var` 0: the sites are on the latent values
    themselves.

    The covariances are found for `rounded`, which is K (n, n) in single or double precision; the
    mean is that of double precision in either case.
    """

    extra_var = 0.0

    def __init__(self, K, rounded, precision, shift):
        self.precision = precision
        self.spread = ClassCovariance(rounded, precision)
        self.alpha = self._alpha(K, shift)
        self.mean = K @ self.alpha
        self.cov = self.spread.own_blocks(rounded)
        if self.spread.single and not np.einsum("ncc->nc", self.cov).min() > 0:
            raise gaussian.ImproperPosterior("single precision does not hold the variances")
        self.log_evidence = 0.5 * float(np.sum(shift * self.mean)) - self.spread.log_det

    def _alpha(self, K, shift):
        """Return K^-1 mean; what single precision leaves of it is solved for once more.

        Plain refinement gave single precision up in three of three fits of five, six and eight
        classes with 600 to 900 rows that were followed; six fits of 600 to 1000 rows took 1.1 to
        1.7 times as long.
        """
        alpha = self.spread.weights(K @ shift, shift)
        if not self.spread.single:
            return alpha
        system = _on_arrays(partial(self._times_system, K), shift.shape)
        nearly = _on_arrays(lambda left: self.spread.weights(K @ left, left), shift.shape)
        how = dict(rtol=1e-5, maxiter=3, M=nearly)
        found, n_left = gcrotmk(system, shift.ravel(), alpha.ravel(), **how)
        if n_left or not np.all(np.isfinite(found)):
            raise gaussian.ImproperPosterior("single precision does not hold the posterior mean")
        return found.reshape(shift.shape)

    def _times_system(self, K, vectors):
        """Return (I + precision K) vectors, which is the shift if these are K^-1 mean."""
        return vectors + star_times(self.precision, K @ vectors)

    def evidence_curvature(self):
        """Return R with d log evidence = sum(R * dK) / 2 at a fixed point of the sites, (n, n).

        Exact for two classes. For more the sites are a curved family, and what the evidence owes to
        their moves is left out: of six classes with 300 rows five nats a unit of a log parameter,
        and over twenty at a variance of 1000.
        """
        R = self.alpha @ self.alpha.T
        R -= np.sum(self.spread.explained, axis=0)
        R += _sum_of_grams(self.spread.offset_parts())
        return R

    def inverse_totals(self):
        """Yield the block (n, n) of each class of the inverse of prior covariance plus sites'."""
        for E, part in zip(self.spread.explained, self.spread.offset_parts(), strict=True):
            yield E - _sum_of_grams([part])


def _on_arrays(function, shape):
    """Return a linear function of arrays of a shape as an operator on vectors."""
    size = np.prod(shape)
    return LinearOperator((size, size), lambda v: function(v.reshape(shape)).ravel(), dtype=float)


def _sum_of_grams(arrays):
    """Return the sum of A' A, by products of half the flops of general ones.

    The arrays have the order of LAPACK.
    """
    total: Any = 0.0
    for A in arrays:
        product = blas.ssyrk if A.dtype == np.float32 else blas.dsyrk
        total = total + product(1.0, A, trans=1, lower=1)
    return gaussian.mirrored(total)


class JointGP(KernelGP):
    """Structure of one Gaussian process prior a class, all with the same kernel over rows X (n, d).

    A posterior costs 2 n^3 flops a class and 2 K + 3 arrays of n^2 numbers; with `single` most of
    it in single precision, and 3 K + 2 arrays of these, for more rows than a few.
    """

    def __init__(self, kernel, X, single=False):
        super().__init__(kernel, X)
        single = single and len(X) > LIMITS.thirds and np.diagonal(self.K).max() < 1e9
        self._rounded = self.K.astype(np.float32) if single else self.K

    def posterior(self, precision, shift):
        """Return the `JointState` for site parameters (n, K), copies of tied rows counted.

        Single precision is given up at this kernel where the mean or a variance does not come out
        of it, as it does in double precision.
        """
        if self._rounded is not self.K:
            try:
                return JointState(self.K, self._rounded, precision, shift)
            except gaussian.ImproperPosterior:
                pass
        state = JointState(self.K, self.K, precision, shift)
        self._rounded = self.K
        return state

    def evidence_gradient(self, state):
        """Return d log evidence / d theta (p,) at a fixed point of the sites."""
        return self.contracted(state.evidence_curvature())

    def expected_curvature(self, state, together=False):
        """Return the expected curvature (p, p) of the log evidence in theta, as with two classes.

        Blocks between classes are left out, and those of classes count K / (K - 1) times: right
        where all classes are alike, which makes the others 1 / (K - 1) of each.
        """
        K = len(state.spread.explained)
        kind = np.float64 if len(self.X) <= LIMITS.thirds else np.float32
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
        return ClassCovariance(self.kernel(self.X), self.precision)

    @property
    def n_classes(self):
        """Number of classes."""
        return self.alpha.shape[1]

    def latent_mean(self, X):
        """Return means (n_new, K) of the classes at new rows."""
        return covariances(self.kernel, X, self.X) @ self.alpha

    def latent(self, X):
        """Return means (n_new, K) and covariances (n_new, K, K) of the classes at new rows."""
        k = covariances(self.kernel, self.X, X)
        return k.T @ self.alpha, self.spread.blocks(self.kernel.diag(X), k)

    def covariance(self, X1, X2, c, j):
        """Return the posterior covariance (n1, n2) of classes c and j between new rows."""
        k1, k2 = (covariances(self.kernel, self.X, new) for new in (X1, X2))
        P, Q1 = self.spread.halves(c, k1)
        shared = Q1.T @ self.spread.halves(j, k2)[1]
        return shared + self.kernel(X1, X2) - P.T @ k2 if c == j else shared

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new, K) of all classes at new rows.

        Given the offsets the classes are independent; one vector of offsets is common to them.
        """
        k, prior = covariances(self.kernel, self.X, X), self.kernel(X)
        draws = np.empty((n_samples, len(X), self.n_classes))
        shared = rng.standard_normal((n_samples, len(k)))
        for c in range(self.n_classes):
            P, Q = self.spread.halves(c, k)
            lower = gaussian.jittered_cholesky(prior - k.T @ P, 1e-10, largest=1e-6)[0]
            own = rng.standard_normal((n_samples, len(X))) @ lower.T
            draws[:, :, c] = k.T @ self.alpha[:, c] + own + shared @ Q
        return draws
