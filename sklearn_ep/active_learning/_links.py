"""What a strategy asks of the link between latent value and label, for every kind of link.

Estimators of this package tell their links by `latent_links`. Those that a logistic function of
some slope stands for have closed forms in its units; any other goes by quadrature of its own
probabilities. Means and variances are those of the latent value in the estimator's own units.
"""

import numpy as np
from scipy.special import entr, ndtr

from .._engine.likelihoods import PROBIT_SLOPE
from .._engine.quadrature import expectation_by_panels, logistic_mixture
from .._engine.super_gaussian import local_site_precision

__all__ = ["FactorLink", "LogisticLink", "links_of"]


class LogisticLink:
    """A logistic function of slope times latent value, or a link that it stands for.

    Parameters
    ----------
    slope : float
    factor : Factor or None, default=None
        The link itself, whose probabilities are used where it is known.
    """

    def __init__(self, slope, factor=None):
        self.slope, self.factor = slope, factor

    def _logistic(self, mean, var):
        return self.slope * mean, self.slope**2 * var

    def proba(self, mean, var):
        """Return the probability (n,) of the label +1."""
        if self.factor is None or self.slope == 1.0:
            return logistic_mixture(*self._logistic(mean, var))[0]
        return np.exp(self.factor.tilted(1.0, mean, var).log_z)

    def precision(self, mean, var):
        """Return the precision (n,) that a label of unknown value adds on average."""
        p = logistic_mixture(*self._logistic(mean, var))[0]
        return self.slope**2 * p * (1.0 - p)

    def bald(self, mean, var):
        """Return the mutual information (n,) of label and latent value (Houlsby et al. 2011).

        H(p) - E H(sigma(s)), with E H(sigma(s)) = E softplus(s) - mean p - var E sigma'(s) by
        Stein's identity. Both are even in the mean; on the negative side nothing cancels.
        """
        mean, var = self._logistic(-np.abs(mean), var)
        p, softplus, rise = logistic_mixture(mean, var)
        expected = softplus - mean * p - var * rise
        return np.maximum(entr(p) + entr(1.0 - p) - expected, 0.0)

    def information_gain(self, mean, var):
        """Return the expected Kullback-Leibler divergence (n,) of the posterior after the label.

        Each label joins by the site that the local bound gives it (Nickisch and Seeger 2009).
        """
        mean, var = self._logistic(mean, var)
        p = logistic_mixture(mean, var)[0]
        total = 0.0
        for shift, proba in ((0.5, p), (-0.5, 1.0 - p)):
            precision = local_site_precision(mean, var, shift)
            kappa = 1.0 + var * precision
            moved = (shift - mean * precision) ** 2 / kappa - precision
            total = total + proba * 0.5 * (np.log(kappa) + var / kappa * moved)
        return total


class FactorLink:
    """Any other likelihood, by its own probabilities.

    Parameters
    ----------
    factor : Factor
    """

    slope = 1.0

    def __init__(self, factor):
        self.factor = factor

    def _labels(self, mean, var):
        """Return (probability, `Tilted`) of the labels +1 and -1."""
        tilted = [self.factor.tilted(y, mean, var) for y in (1.0, -1.0)]
        return [(np.exp(t.log_z), t) for t in tilted]

    def proba(self, mean, var):
        """Return the probability (n,) of the label +1."""
        return np.exp(self.factor.tilted(1.0, mean, var).log_z)

    def precision(self, mean, var):
        """Return the precision (n,) that takes from the variance what a label does on average."""
        fall = var * sum(p * t.curvature for p, t in self._labels(mean, var))
        return np.maximum(fall, 0.0) / (var * np.maximum(1.0 - fall, np.finfo(float).tiny))

    def bald(self, mean, var):
        """Return the mutual information (n,) of label and latent value, by quadrature."""

        def entropy(f):
            return sum(entr(np.exp(self.factor.log_prob(y, f))) for y in (1.0, -1.0))

        p = self.proba(mean, var)
        known = expectation_by_panels(entropy, mean, var)
        return np.maximum(entr(p) + entr(1.0 - p) - known, 0.0)

    def information_gain(self, mean, var):
        """Return the expected Kullback-Leibler divergence (n,) after a label, moments matched."""
        total = 0.0
        for p, t in self._labels(mean, var):
            left = 1.0 - var * t.curvature
            total = total + p * 0.5 * (left - 1.0 - np.log(left) + var * t.gradient**2)
        return total


def links_of(estimator, mean, var, proba):
    """Return one link a binary problem: those that the estimator tells, or the likeliest ones.

    Parameters
    ----------
    estimator : classifier
    mean, var : ndarray of shape (n, n_problems)
    proba : ndarray of shape (n, n_classes)
    """
    if hasattr(estimator, "latent_links"):
        return [_link_of(factor) for factor in estimator.latent_links()]
    slope = PROBIT_SLOPE if _looks_probit(mean, var, proba) else 1.0
    return [LogisticLink(slope)] * mean.shape[1]


def _link_of(factor):
    slope = getattr(factor, "logistic_slope", None)
    return FactorLink(factor) if slope is None else LogisticLink(slope, factor)


def _looks_probit(mean, var, proba):
    """Tell the link of an estimator that does not: which of two explains its probabilities?"""
    candidates = [ndtr(mean / np.sqrt(1.0 + var)), logistic_mixture(mean, var)[0]]
    if mean.shape[1] == 1:
        proba = proba[:, 1:]
    else:
        candidates = [p / p.sum(axis=1, keepdims=True) for p in candidates]
    error = [np.sum(np.abs(p - proba)) for p in candidates]
    return bool(error[0] < error[1])
