"""ConvexVariationalLogistic as one posterior, for tests that are about that posterior."""

from collections import namedtuple

import numpy as np

from sklearn_ep import ConvexVariationalLogistic

Penalty = namedtuple("Penalty", ["value", "slope", "curvature", "precision"])
__all__ = ["NormalPrior", "log_half_cauchy", "plain_logistic"]


def plain_logistic(prior_variance=1.0, **kwargs):
    """Return the estimator without calibration and averages: a learned scale is at its mode."""
    plain = dict(calibration=None, hyperparameters="mode")
    return ConvexVariationalLogistic(prior_variance, **plain | kwargs)


def log_half_cauchy(phi, X):
    """Return the log density of a log prior variance, half-Cauchy in the sd of the predictor."""
    sd = np.sqrt(np.exp(phi) * X.var(axis=0).sum())
    return np.log(2.0 / (np.pi * 2.5 * (1.0 + (sd / 2.5) ** 2))) + np.log(0.5 * sd)


class NormalPrior:
    """What the double loop asks of a prior, of independent normal coefficients."""

    n_sites, learn, start_scale = 0, False, 1.0

    def __init__(self, variance, n):
        self.precision = np.full(n, 1.0 / variance)

    def start_precision(self, scale):
        return self.precision

    def penalty(self, u, variances, scale):
        slope = self.precision * u
        return Penalty(0.5 * slope * u, slope, self.precision, self.precision)

    def log_normaliser(self, scale):
        return 0.5 * np.sum(np.log(self.precision))
