"""Inducing values of a Gaussian process in whitened coordinates: prior, posterior, predictions.

Inducing values u ~ N(0, Kzz), Kzz = L L', are represented by e = L^-1 u ~ N(0, I). Row i has
w_i = L^-1 k(Z, x_i), and its latent value is w_i' e plus an independent N(0, s_i) (FITC). The
posterior precision of e is I plus a positive semidefinite matrix, so it cannot be badly conditioned
from below.
"""

from functools import cached_property

import numpy as np
from sklearn.utils import gen_batches

from ..._engine.gaussian import (
    checked_cholesky,
    jittered_cholesky,
    lower_times,
    positive_variance,
    triangular_inverse,
)
from .._kernels import StationaryCross, cross_covariance, finite_or_named
from .single import SingleCross

__all__ = ["InducingPosterior", "InducingPrior", "InducingGPPosterior", "block_rows", "rebase"]

# Bytes of a block of W: few enough to stay in cache, enough for the full product rate.
_BLOCK_BYTES = 800_000


def block_rows(m, kind=np.float64):
    """Return the number of rows of a block for m inducing points in a float type."""
    return int(np.clip(_BLOCK_BYTES // (m * np.dtype(kind).itemsize), 128, 4096))


class InducingPrior:
    """Prior of the inducing values at points Z (m, d) under one kernel.

    `lower` and `inverse` are L and L^-1. `jitter` is the relative addition to the diagonal of Kzz:
    the given one grows where Kzz is not positive definite, the attribute is the one in use.
    """

    def __init__(self, kernel, Z, jitter):
        self.kernel, self.Z = kernel, Z
        self.cross = cross_covariance(kernel, Z)
        Kzz, self._kept = self.cross.block(Z)
        self.lower, self.jitter = jittered_cholesky(Kzz, jitter)
        self.inverse = np.asfortranarray(triangular_inverse(self.lower))

    @cached_property
    def single(self):
        """Covariances with the points and L^-1, both in single precision where there is a way."""
        stationary = isinstance(self.cross, StationaryCross)
        cross = SingleCross(self.cross) if stationary else self.cross
        return cross, self.inverse.astype(np.float32)

    def parts(self, kind):
        """Return (covariances with the points, L^-1) of a float type."""
        return self.single if kind is np.float32 else (self.cross, self.inverse)

    def whiten(self, X, keep=False, kind=np.float64):
        """Return W (n, m), the variances s (n,), and what a contraction of derivatives needs.

        s_i is the variance of the latent value given u; rounding below zero is set to zero. W is of
        the float type `kind`.
        """
        cross, inverse = self.parts(kind)
        K, kept = cross.block(X)
        K = K.astype(kind, copy=keep)
        W = lower_times(inverse, K.T).T
        extra_var = self.cross.diagonal(X) - np.einsum("ij,ij->i", W, W)
        return W, np.maximum(extra_var, 0.0), kept

    def contract(self, M, inputs, kind=np.float64):
        """Return the gradient of a scalar from its derivative L^-T M L^-1 in Kzz, M symmetric.

        The derivatives of the kernel are summed in the float type `kind`.
        """
        half = lower_times(self.inverse, M.copy(), trans=True)
        G = lower_times(self.inverse, half.T, trans=True)
        G[np.diag_indices_from(G)] *= 1.0 + self.jitter
        cross, _ = self.parts(kind)
        theta, towards = cross.contract(cross.rounded_block(self._kept), G, inputs)
        # G is symmetric and both arguments of the kernel move with Z
        return theta, 2.0 * towards


class InducingPosterior:
    """Posterior of the whitened inducing values, N(A^-1 b, A^-1) with A = I + gram.

    gram (m, m) is the sum over rows of site precision times w w', b = shift (m,) that of site shift
    times w.
    """

    def __init__(self, gram, shift):
        self.gram, self.shift = gram, shift
        A = gram.copy()
        A[np.diag_indices_from(A)] += 1.0
        lower = checked_cholesky(A)
        self.inverse = np.asfortranarray(triangular_inverse(lower))
        self.mean = self.inverse.T @ (self.inverse @ shift)
        self.log_evidence = 0.5 * shift @ self.mean - np.sum(np.log(np.diagonal(lower)))

    @cached_property
    def cov(self):
        """Covariance A^-1 (m, m)."""
        return self.inverse.T @ self.inverse

    @cached_property
    def _single(self):
        return self.cov.astype(np.float32), self.mean.astype(np.float32)

    def root(self, W):
        """Return T with T T' = W A^-1 W' (n, m)."""
        return lower_times(self.inverse, W.copy().T).T

    def marginals(self, W, smooth=False):
        """Return mean and variance (n,) of W e and, if asked for, W A^-1 (n, m).

        Of rows in single precision no variance is below what rounding leaves of it.
        """
        if W.dtype == np.float32:
            cov, mean = self._single
            smoothed = W @ cov
            var = np.einsum("ij,ij->i", smoothed, W)
            least = np.finfo(np.float32).eps * np.einsum("ij,ij->i", W, W)
            return (W @ mean).astype(float), np.maximum(var, least).astype(float), smoothed
        smoothed = None
        if smooth:  # one product in place of two triangular ones
            smoothed = W @ self.cov
            var = np.einsum("ij,ij->i", smoothed, W)
        else:
            root = self.root(W)
            var = np.einsum("ij,ij->i", root, root)
        return W @ self.mean, var, smoothed


def rebase(gram, shift, old, new):
    """Return the sums (C, m, m) and (C, m) that sites have under another prior.

    The sites stay the same functions of u: with T = L_old^-1 L_new a gram becomes T' gram T.
    """
    if old is new:
        return gram, shift
    T = lower_times(old.inverse, new.lower.copy())  # triangular as well
    halves = [lower_times(T, g.copy(), trans=True) for g in gram]
    return np.stack([lower_times(T, h.T, trans=True) for h in halves]), shift @ T


class InducingGPPosterior:
    """Predictions from inducing points; the factor turns latent values into label probabilities."""

    def __init__(self, prior, posterior, factor):
        self.prior, self.posterior, self.factor = prior, posterior, factor

    @property
    def inducing_mean(self):
        """Posterior mean of the inducing values (m,)."""
        return self.prior.lower @ self.posterior.mean

    @property
    def inducing_cov(self):
        """Posterior covariance of the inducing values (m, m)."""
        return self.prior.lower @ self.posterior.cov @ self.prior.lower.T

    @finite_or_named
    def latent(self, X):
        """Return mean and variance (n,) at new rows; O(m^2) a row, in blocks of rows."""
        mean, var = np.empty(len(X)), np.empty(len(X))
        for rows in gen_batches(len(X), block_rows(len(self.prior.Z))):
            W, extra_var, _ = self.prior.whiten(X[rows])
            mean[rows], var[rows], _ = self.posterior.marginals(W)
            var[rows] += extra_var
        return mean, positive_variance(var, self.prior.cross.diagonal(X))

    @finite_or_named
    def covariance(self, X1, X2):
        """Return the posterior covariance (n1, n2) of the latent values at new rows."""
        kernel = self.prior.kernel
        W1 = self.prior.whiten(X1)[0]
        W2 = W1 if X2 is X1 else self.prior.whiten(X2)[0]
        prior = kernel(X1) if X2 is X1 else kernel(X1, X2)
        return prior - W1 @ W2.T + self.posterior.root(W1) @ self.posterior.root(W2).T
