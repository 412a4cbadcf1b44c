"""The step likelihood of a label that may be wrong, and its one-dimensional layer.

With the white noise of the latent function counted as part of the variable, g = f + noise, the
probit with label errors is a step, and everything about it is a function of one number: the mean of
g over its standard deviation.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr

from ..._engine.likelihoods import Factor, Tilted, normal_hazard

_PEAK = 1.0 / math.sqrt(2.0 * math.pi)


class StepMoments(NamedTuple):
    """Moments of right [x > 0] + wrong [x < 0] under x ~ N(z, 1).

    log_z is the log mass, slope its derivative in z, beta = slope (slope + z) one minus the
    variance, spread the variance itself, wrong the probability of x < 0.
    """

    log_z: np.ndarray
    slope: np.ndarray
    beta: np.ndarray
    spread: np.ndarray
    wrong: np.ndarray


def _sure_moments(z):
    """Return slope, slope + z and variance for labels without errors, free of cancellation."""
    slope, above = normal_hazard(z)
    far = np.minimum(z, -30.0) ** -2.0
    series = far * (1.0 - far * (6.0 - far * (50.0 - far * (518.0 - far * 6354.0))))
    # for z below -6 the sum slope + z is known to more digits than slope^2 + slope z needs
    return slope, above, np.where(z < -30.0, series, 1.0 - slope * above)


def step_moments(z, log_right, log_wrong):
    """Return the `StepMoments` at z, of any shape.

    z is mean over standard deviation, positive where the cavity agrees with the label; the other
    arguments are logs of the weights of the two sides, -inf for a label that cannot be wrong.
    """
    z = np.asarray(z, dtype=float)
    if log_wrong == -math.inf:
        slope, above, spread = _sure_moments(z)
        log_z = log_right + log_ndtr(z)
        return StepMoments(log_z, slope, slope * above, spread, np.zeros_like(z))
    right, wrong = math.exp(log_right), math.exp(log_wrong)
    # a sum of positive terms, never below the smaller weight: no need of logs
    of_wrong = wrong * ndtr(-z)
    mass = right * ndtr(z) + of_wrong
    slope = (right - wrong) * _PEAK * np.exp(-0.5 * z**2) / mass
    beta = slope * (slope + z)
    return StepMoments(np.log(mass), slope, beta, 1.0 - beta, of_wrong / mass)


class LabelErrorStep(Factor):
    """p(y | g)^u for p = 1 - e where the sign of g is y, and e where it is not.

    e in [0, 0.5) is the rate of wrong labels, u the exponent; `log_weights` are the logs of
    (1 - e)^u and e^u, the weights of the right and of the wrong side.

    A site on g = f + noise for noise of variance s; with s added to the variance of f the factor is
    `LabelNoise` (and `Probit` for e = 0). Where label and cavity disagree beta, hence the site
    precision, is negative: that is how a label counts as suspect.
    """

    def __init__(self, rate, exponent=1.0):
        self.rate, self.exponent = rate, exponent
        self.log_concave = rate == 0
        log_wrong = math.log(rate) if rate > 0 else -math.inf
        self.log_weights = exponent * math.log1p(-rate), exponent * log_wrong

    def powered(self, exponent):
        """Return the factor to the power, which is again a step."""
        return LabelErrorStep(self.rate, self.exponent * exponent)

    def log_prob(self, y, f):
        """Return the log weight of the side that f is on."""
        return np.where(np.asarray(y) * f > 0, *self.log_weights)

    def moments(self, y, mean, var):
        """Return the `StepMoments` of the rows."""
        return step_moments(y * mean / np.sqrt(var), *self.log_weights)

    def tilted(self, y, mean, var):
        """Return log Z and derivatives in closed form."""
        m = self.moments(y, mean, var)
        return Tilted(m.log_z, y * m.slope / np.sqrt(var), m.beta / var)

    def contraction(self, y, mean, var, extra_var, curvature):
        """Return 1 - var * curvature; a certain label far out needs its own formula for it."""
        total = var + extra_var
        left = 1.0 - var * curvature
        if self.rate > 0:
            return left
        z = y * mean / np.sqrt(total)
        # further out on the wrong side the difference loses its digits
        return np.where(z < -6.0, (extra_var + var * _sure_moments(z)[2]) / total, left)

    def wrong_proba(self, y, mean, var):
        """Return the probability (n,) that the label is wrong, for g ~ N(mean, var)."""
        return self.moments(y, mean, var).wrong
