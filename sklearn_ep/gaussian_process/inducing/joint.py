"""All classes jointly through inducing points: linear predictors in whitened inducing values.

The classes share points and kernel, hence the whitened rows W of `values`; the sites of
`_engine.class_sites` sit on the projected values W e_c and join the classes. All rows are in
memory.
"""

import numpy as np
from sklearn.utils import gen_batches

from ..._engine.class_sites import ClassWeights, class_covariances
from ..._engine.gaussian import add_to_diagonal, checked_cholesky
from .values import InducingPrior, block_rows


class JointInducingGP(ClassWeights):
    """Structure of one Gaussian process a class at rows X, seen through points Z (FITC)."""

    def __init__(self, kernel, X, Z, jitter):
        self.X, self.of_points = X, InducingPrior(kernel, Z, jitter)
        W, extra_var, self._kept = self.of_points.whiten(X, keep=True)
        super().__init__(W, np.ones(W.shape[1]), extra_var)

    def evidence_gradient(self, state, noise_slope):
        """Return d log evidence / d theta (p,) at a fixed point of the sites, the points kept.

        `noise_slope` (n,) are the derivatives of the log evidence in the extra variances. As for
        dense sites of several classes the gradient is close, not exact.
        """
        W, C = self.B, state.precision.shape[1]
        scaled = noise_slope[:, None] * W
        towards_w, M = state.pull() @ state.coef, W.T @ scaled
        share = (state.precision / state.precision.sum(1, keepdims=True))[:, :, None]
        for c in range(C):
            smoothed = np.stack([W @ state.spread[j, :, c] for j in range(C)], axis=1)
            common = np.sum(share * smoothed, axis=1)
            towards_w -= state.precision[:, c : c + 1] * (smoothed[:, c] - common)
            M -= 0.5 * (state.spread[c, :, c] + np.outer(state.coef[c], state.coef[c]))
        add_to_diagonal(M, 0.5 * C)
        G = (towards_w - 2.0 * scaled) @ self.of_points.inverse
        theta, _ = self.of_points.cross.contract(self._kept, G, False)
        diagonal = self.of_points.cross.contract_diagonal(self.X, noise_slope)
        return theta + diagonal + self.of_points.contract(M, False)[0]


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
            cov[rows] = class_covariances(self.spread, W)
            np.einsum("ncc->nc", cov[rows])[:] += extra_var[:, None]
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
