"""Inducing values of a Gaussian process in whitened coordinates: prior, posterior, predictions.

Inducing values u ~ N(0, Kzz), Kzz = L L', are represented by e = L^-1 u ~ N(0, I). Row i has
w_i = L^-1 k(Z, x_i), and its latent value is w_i' e plus an independent N(0, s_i) (FITC). The
posterior precision of e is I plus a positive semidefinite matrix, so it cannot be badly conditioned
from below.

The structure at rows in memory is here, too.
"""

from functools import cached_property

import numpy as np

from ..._engine import gaussian
from ..._engine.partition import KEPT
from .._dense_gp import finite_or_named
from .._kernels import SingleCross, cross_covariance


def block_rows(m, entries=100_000):
    """Return the number of rows of a block of W for m inducing points.

    Few enough entries to stay in cache, enough for the full product rate.
    """
    return int(np.clip(entries // m, 128, 4096))


def times_rows(v, W):
    """Return v W (m,) in the float type of W."""
    return v.astype(W.dtype, copy=False) @ W


class InducingPrior:
    """Prior of the inducing values at points Z (m, d) under one kernel.

    `lower` and `inverse` are L and L^-1. `jitter` is the relative addition to the diagonal of Kzz:
    the given one grows where Kzz is not positive definite, the attribute is the one in use.
    """

    def __init__(self, kernel, Z, jitter):
        self.kernel, self.Z = kernel, Z
        self.cross = cross_covariance(kernel, Z)
        Kzz, self._kept = self.cross.block(Z)
        self.lower, self.jitter = gaussian.jittered_cholesky(Kzz, jitter)
        self.inverse = np.asfortranarray(gaussian.triangular_inverse(self.lower))

    def same_as(self, other):
        """Return whether another prior whitens rows as this one does."""
        alike = self.kernel == other.kernel and self.jitter == other.jitter
        return alike and np.array_equal(self.Z, other.Z)

    @cached_property
    def single(self):
        """Covariances with the points and L^-1, both in single precision where there is a way."""
        cross = SingleCross(self.cross) if self.cross.of_distances else self.cross
        return cross, self.inverse.astype(np.float32)

    def parts(self, kind):
        """Return (covariances with the points, L^-1) of a float type."""
        return self.single if kind is np.float32 else (self.cross, self.inverse)

    def whiten(self, X, keep=False, kind=np.float64):
        """Return W (n, m), the variances s (n,), and what a contraction of derivatives needs.

        s_i is the variance of the latent value given u; rounding below zero is set to zero. W is of
        the float type `kind`. A contraction needs the rows and the kernel; with `keep` they last.
        """
        X = np.asarray(X, dtype=np.float64)
        cross, inverse = self.parts(kind)
        K, kept = cross.block(X)
        K = K.astype(kind, copy=keep)
        W = gaussian.lower_times(inverse, K.T).T
        extra_var = self.cross.diagonal(X) - np.einsum("ij,ij->i", W, W)
        return W, np.maximum(extra_var, 0.0), (X, kept) if keep else None

    def contract(self, M, inputs, kind=np.float64):
        """Return the gradient of a scalar from its derivative L^-T M L^-1 in Kzz, M symmetric.

        The derivatives of the kernel are summed in the float type `kind`.
        """
        half = gaussian.lower_times(self.inverse, M.copy(), trans=True)
        G = gaussian.lower_times(self.inverse, half.T, trans=True)
        G[np.diag_indices_from(G)] *= 1.0 + self.jitter
        cross, _ = self.parts(kind)
        theta, towards = cross.contract(cross.rounded_block(self._kept), G, inputs)
        # G is symmetric and both arguments of the kernel move with Z
        return theta, 2.0 * towards


def whitened(prior, X, blocks, place, kind=np.float64, keep=False):
    """Return what `whiten` says of each block of rows, from `KEPT` if it is known there.

    Passes under one prior follow each other: what is whitened of a part is kept at its `place`, if
    that is not None, until the prior is another. That is so where there are no more points than
    columns, and not with `keep`, since a contraction needs the kernel again.
    """
    each, size = (prior.whiten(X[block], keep, kind) for block in blocks), len(X) * len(prior.Z)
    if place is None or keep or len(prior.Z) > X.shape[1] or size > KEPT.most:
        return each
    token, k = place
    known = KEPT.find(token, k)
    if known is None or known[0] is not kind or not known[1].same_as(prior):
        known = kind, prior, list(each)
        KEPT.keep(token, k, known, size)
    return known[2]


class InducingPosterior:
    """Posterior of the whitened inducing values, N(A^-1 b, A^-1) with A = I + gram.

    gram (m, m) is the sum over rows of site precision times w w', b = shift (m,) that of site shift
    times w.
    """

    def __init__(self, gram, shift):
        self.gram, self.shift = gram, shift
        A = gram.copy().T  # symmetric, and in the order of LAPACK
        gaussian.add_to_diagonal(A, 1.0)
        self.inverse = gaussian.inverse_factor(A)
        self.mean = self.inverse.T @ (self.inverse @ shift)
        self.log_evidence = 0.5 * shift @ self.mean + np.sum(np.log(np.diagonal(self.inverse)))

    @cached_property
    def cov(self):
        """Covariance A^-1 (m, m)."""
        return gaussian.inverse_from_triangular(self.inverse)

    @cached_property
    def _single(self):
        return self.cov.astype(np.float32), self.mean.astype(np.float32)

    def root(self, W):
        """Return T with T T' = W A^-1 W' (n, m)."""
        return gaussian.lower_times(self.inverse, W.copy().T).T

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


def _times_blocks(T, gram):
    """Return T' times each block of rows of a gram (k m, k m), for T (m, m) lower triangular."""
    blocks = np.split(gram, len(gram) // len(T))
    return np.concatenate([gaussian.lower_times(T, block.copy(), trans=True) for block in blocks])


def rebase(gram, shift, old, new):
    """Return the sums (P, q, q) and (P, q) that sites have under another prior of their points.

    The sites stay the same functions of u: with T = L_old^-1 L_new a gram becomes T' gram T, for
    each of the q / m latent functions of a posterior.
    """
    if old is new:
        return gram, shift
    m = len(old.Z)
    T = gaussian.lower_times(old.inverse, new.lower[:m, :m].copy())  # triangular as well
    grams = [_times_blocks(T, _times_blocks(T, g).T) for g in gram]
    return np.stack(grams), (shift.reshape(-1, len(T)) @ T).reshape(shift.shape)


def grown(gram, shift, old, new):
    """Return the sums that sites have under a prior with further points after the old ones."""
    m, added = len(old.Z), (0, len(new.Z) - len(old.Z))
    P, k = len(gram), shift.shape[1] // m
    gram, shift = rebase(gram, shift, old, new)
    gram, shift = gram.reshape(P, k, m, k, m), shift.reshape(P, k, m)
    same, q = (0, 0), k * len(new.Z)
    gram, shift = np.pad(gram, (same, same, added, same, added)), np.pad(shift, (same, same, added))
    return gram.reshape(P, q, q), shift.reshape(P, q)


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
        for rows in gaussian.row_blocks(len(X), most=block_rows(len(self.prior.Z))):
            W, extra_var, _ = self.prior.whiten(X[rows])
            mean[rows], var[rows], _ = self.posterior.marginals(W)
            var[rows] += extra_var
        return mean, gaussian.positive_variance(var, self.prior.cross.diagonal(X))

    @finite_or_named
    def covariance(self, X1, X2):
        """Return the posterior covariance (n1, n2) of the latent values at new rows."""
        kernel = self.prior.kernel
        W1 = self.prior.whiten(X1)[0]
        W2 = W1 if X2 is X1 else self.prior.whiten(X2)[0]
        prior = kernel(X1) if X2 is X1 else kernel(X1, X2)
        return prior - W1 @ W2.T + self.posterior.root(W1) @ self.posterior.root(W2).T


class InducingState:
    """Posterior of the conditional means t = E[f | u] given sites on them, copies counted.

    `mean` and `var` (n,) are the marginals of t, `posterior` is the `InducingPosterior`, and
    `log_evidence` the log of the integral of prior times sites.
    """

    def __init__(self, W, precision, shift):
        self.precision, self.shift = precision, shift
        self.posterior = InducingPosterior(gaussian.weighted_gram(W, precision), shift @ W)
        root = self.posterior.root(W)
        self.mean, self.var = W @ self.posterior.mean, np.einsum("ij,ij->i", root, root)
        self.log_evidence = self.posterior.log_evidence


class InducingGP:
    """Structure of a Gaussian process at rows X seen through inducing points Z (FITC).

    `jitter` is the relative addition to the diagonal of the covariance of the inducing values;
    `extra_var` (n,) are the variances of f given u, independent for each copy of a row. A posterior
    costs 3 n m^2 flops, memory n m numbers.
    """

    def __init__(self, kernel, X, Z, jitter):
        self.X, self.prior = X, InducingPrior(kernel, Z, jitter)
        self.W, self.extra_var, (_, self._kept) = self.prior.whiten(X, keep=True)

    def posterior(self, precision, shift):
        """Return the `InducingState` for site parameters (n,), copies of tied rows counted."""
        return InducingState(self.W, precision, shift)

    def covariance(self, state):
        """Return the posterior covariance (n, n) of the means t of the rows."""
        root = state.posterior.root(self.W)
        return root @ root.T

    def evidence_gradient(self, state, noise_slope, inputs=False):
        """Return d log evidence / d theta (p,) and / d Z (m, d) at a fixed point of the sites.

        `noise_slope` (n,) are the derivatives of the log evidence in the extra variances. Without
        `inputs` the derivative in Z is 0.0; with it the kernel has to know its own.
        """
        posterior, W = state.posterior, self.W
        towards_w = -state.precision[:, None] * (W @ posterior.cov)
        towards_w += np.outer(state.shift - state.precision * state.mean, posterior.mean)
        towards_w -= (2.0 * noise_slope)[:, None] * W
        G = gaussian.lower_times(self.prior.inverse, towards_w.T, trans=True).T
        theta, towards = self.prior.cross.contract(self._kept, G, inputs)
        M = gaussian.weighted_gram(W, noise_slope)
        M -= 0.5 * (posterior.cov + np.outer(posterior.mean, posterior.mean))
        gaussian.add_to_diagonal(M, 0.5)
        diagonal = self.prior.cross.contract_diagonal(self.X, noise_slope)
        of_prior, towards_prior = self.prior.contract(M, inputs)
        return theta + diagonal + of_prior, towards + towards_prior
