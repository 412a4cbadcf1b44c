"""The model of several factors as a function of theta, the coordinates of all their covariances."""

from typing import NamedTuple

import numpy as np
from scipy.stats import norm

from ..._engine.averaging import Node
from .. import _log_cholesky as log_cholesky
from .given_scales import SharedPrior, solve_given_scales
from .layout import Layout

__all__ = ["CrossedModel"]

_ROW_FLOPS = 500  # of the moments of a row, in units of what BLAS does meanwhile


class CrossedModel(NamedTuple):
    """Rows as laid out, and the priors.

    n_effects and n_levels are of all factors; beta_precision (D,) is the prior precision of the
    coefficients; theta_mean and theta_sd (T,) the normal prior of theta, factor by factor; power is
    the share of a row's likelihood that is matched.
    """

    layout: Layout
    local: int
    n_effects: list[int]
    n_levels: list[int]
    beta_precision: np.ndarray
    theta_mean: np.ndarray
    theta_sd: np.ndarray
    power: float = 1.0

    @property
    def factors(self):
        """Numbers of the factors."""
        return range(len(self.n_effects))

    def spans(self):
        """Return the slice of theta that belongs to each factor."""
        return log_cholesky.spans(self.n_effects)

    def flops(self):
        """Return about how many operations a pass takes."""
        layout, d = self.layout, len(self.beta_precision)
        s, (n, e) = d + layout.width, layout.pair.shape
        return _ROW_FLOPS * n + n * (d + e) ** 2 + 2.0 * len(layout.pair_group) * s + 3.0 * s**3

    def factors_of(self, theta):
        """Return the Cholesky factor (q_f, q_f) of the covariance of each factor's effects."""
        return log_cholesky.factors(theta, self.n_effects)

    def shared_prior(self, theta):
        """Return the `SharedPrior` at theta."""
        lower, shared = self.factors_of(theta), [f for f in self.factors if f != self.local]
        inverse = [np.linalg.inv(lower[f] @ lower[f].T) for f in shared]
        return SharedPrior(self.beta_precision, inverse, [self.n_levels[f] for f in shared])

    def evaluate(self, theta, sites, tol, max_passes=30):
        """Return the `Node` at theta, with `GivenScales`, started at `AllSites` of another."""
        scale = self.factors_of(theta)[self.local]
        prior = self.shared_prior(theta)
        options = dict(tol=tol, max_passes=max_passes, power=self.power)
        found = solve_given_scales(self.layout, prior, scale, sites, **options)
        log_prior = float(np.sum(norm.logpdf(theta, self.theta_mean, self.theta_sd)))
        gradient = self._gradient(theta, found)
        return Node(theta, found.log_z, log_prior, gradient, found.mismatch, found)

    def _gradient(self, theta, found):
        """Return the gradient (T,) of the log density of theta.

        At a fixed point of the sites it is the explicit one: of the prior of the effects, under
        their posterior.
        """
        out = (self.theta_mean - theta) / self.theta_sd**2
        start = len(self.beta_precision)
        for f, (span, lower) in enumerate(zip(self.spans(), self.factors_of(theta), strict=True)):
            q, n = self.n_effects[f], self.n_levels[f]
            if f == self.local:
                moment = found.local_moment
            else:
                own = slice(start, start + q * n)
                mean, root = found.mean[own].reshape(n, q), found.root[:, own]
                halves = root.reshape(-1, n, q)
                second = mean.T @ mean + np.einsum("snq,snp->qp", halves, halves, optimize=True)
                inner = np.linalg.solve(lower, second)
                moment = np.linalg.solve(lower, inner.T) - n * np.eye(q)
                start += q * n
            out[span] += log_cholesky.slope(theta[span], q, moment)
            if f == self.local:
                out[span.start] += found.slope
        return out
