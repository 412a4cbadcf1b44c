"""What a fixed point of EP predicts, in the units of the user."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import softmax

from ._units import Standardisation

__all__ = ["CoefficientPosterior", "predictive"]


@dataclass
class CoefficientPosterior:
    """Gaussian posterior of the coefficients at one fixed point.

    The `marginals` (DenseMarginals or LowRankMarginals) are in working units, the variance `noise`
    in those of the user; `log_evidence` weighs fixed points against each other.
    """

    units: Standardisation
    marginals: Any
    noise: float
    log_evidence: float

    def latent_covariance(self, A, B):
        """Return the covariance (n1, n2) of the noise-free responses at rows in user's units."""
        first = self.units.rows(A)
        second = first if B is A else self.units.rows(B)
        cov = self.units.y_scale**2 * self.marginals.covariance(first, second)
        return cov + self.units.intercept_variance(self.noise)

    def intercept_std(self):
        """Return the standard deviation of the intercept, the noise-free response at zero."""
        origin = np.zeros((1, len(self.marginals.mean)))
        return float(np.sqrt(self.latent_covariance(origin, origin)[0, 0]))

    def block(self, index):
        """Return the covariance (k, k) of some coefficients."""
        unit = self.units.to_coef(np.ones(len(self.marginals.mean)))[index]
        return self.marginals.block(index) * np.outer(unit, unit)

    def draw(self, n_samples, rng):
        """Return draws of the coefficients, an intercept in the last column if there is one."""
        coef = self.units.to_coef(self.marginals.draw(n_samples, rng))
        if not self.units.fit_intercept:
            return coef
        sd = np.sqrt(self.units.intercept_variance(self.noise))
        intercept = self.units.intercept(coef) + sd * rng.standard_normal(n_samples)
        return np.column_stack([coef, intercept])


def predictive(posteriors, X, with_variance):
    """Return mean and variance (n,), or None, of new responses, posteriors weighted by evidence."""
    units, noise = posteriors[0].units, posteriors[0].noise
    rows = units.rows(X)
    weight = softmax([p.log_evidence for p in posteriors])
    means = np.stack([rows @ p.marginals.mean for p in posteriors])
    mean = weight @ means
    response = units.y_offset + units.y_scale * mean
    if not with_variance:
        return response, None
    spread = np.stack([p.marginals.covariance(rows) for p in posteriors]) + (means - mean) ** 2
    variance = units.y_scale**2 * (weight @ spread) + noise + units.intercept_variance(noise)
    return response, variance
