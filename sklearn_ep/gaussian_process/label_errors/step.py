"""The step likelihood of a label that may be wrong, and what a relaxation of its row costs.

With the white noise of the latent function counted as part of the variable, g = f + noise, the
probit with label errors is a step, and everything about it is a function of one number: the mean of
g over its standard deviation. A relaxation factor exp(-b (g - m)^2 / 2) around the centre m of the
old site multiplies the cavity before moments are matched. In units of the cavity, gamma = b times
its variance, all that it does is to move that number.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr

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
        root = np.sqrt(var)
        m = step_moments(y * mean / root, *self.log_weights)
        return Tilted(m.log_z, y * m.slope / root, m.beta / var)

    def contraction(self, y, mean, var, extra_var, curvature):
        """Return 1 - var * curvature; a certain label far out needs its own formula for it."""
        total = var + extra_var
        left = 1.0 - var * curvature
        if self.rate > 0:
            return left
        z = y * mean / np.sqrt(total)
        # further out on the wrong side the difference loses its digits
        return np.where(z < -6.0, (extra_var + var * _sure_moments(z)[2]) / total, left)

    def cumulants(self, y, mean, var):
        """Return log Z and the first four cumulants (4, n) of factor times N(mean, var)."""
        root, m = np.sqrt(var), self.moments(y, mean, var)
        z = y * mean / root
        bend = 2.0 * m.slope + z
        third = m.beta * bend - m.slope
        fourth = 2.0 * m.beta * m.spread - third * bend
        scale = np.stack([y * root, var, y * root**3, var**2])
        return m.log_z, scale * np.stack([m.slope + z, m.spread, third, fourth])

    def wrong_proba(self, y, mean, var):
        """Return the probability (n,) that the label is wrong, for g ~ N(mean, var)."""
        return self.moments(y, mean, var).wrong


# Shares of the largest gamma that can win where the cost is looked at first; denser at the small
# end, because z moves by gamma times the distance of the centre, which is not bounded.
_SHARES = np.concatenate([[0.0], np.geomspace(1e-4, 0.02, 12), np.linspace(0.03, 1.0, 36)])
# Where the divergence is looked at for bounds that hold everywhere: beyond it has settled, and what
# is between two points is within the margin, also for rates of 1e-300.
_Z = np.linspace(-40.0, 10.0, 4001)


def _divergence(z, rate):
    """Return the `StepMoments` at z, the divergence to their normal distribution, and its slope.

    Of Kullback and Leibler, from the tilted distribution to its moment match.
    """
    m = step_moments(z, *LabelErrorStep(rate).log_weights)
    bent = m.slope * m.spread - m.beta * (m.slope + z)
    slope = -0.5 * (m.slope + m.beta * z + bent / m.spread)
    if rate == 0:
        # - log Phi(z) and slope z / 2 both grow like z^2 / 2 on the wrong side; without it:
        below = np.minimum(z, 0.0)
        far = 0.5 * below * (m.slope + below) - np.log(0.5 * erfcx(-below / np.sqrt(2.0)))
        near = np.where(z < 0, far, 0.5 * m.slope * z - m.log_z)
        return m, 0.5 * np.log(m.spread) + near, slope
    log_right, log_wrong = LabelErrorStep(rate).log_weights
    entropy = log_right + m.wrong * (log_wrong - log_right) - m.log_z
    height = m.slope / (1.0 - 2.0 * rate)
    turned = height * ((1.0 - rate) * m.wrong + rate * (1.0 - m.wrong))
    value = entropy + 0.5 * (np.log(m.spread) + m.slope * z)
    return m, value, slope + (log_right - log_wrong) * turned


def _cost_and_slope(gamma, z0, mubar, c, rate, cost):
    """Return `relaxed_cost` and its derivative in gamma."""
    widened = 1.0 + gamma
    root = np.sqrt(widened)
    z = (z0 + gamma * mubar) / root
    m, value, slope = _divergence(z, rate)
    moved = (mubar - 0.5 * z / root) / root
    slope = slope * moved
    if cost == "mass":
        away = (mubar - z0) ** 2
        mass = np.exp(m.log_z - 0.5 * away * (gamma / widened)) / root
        log_slope = m.slope * moved - 0.5 * (1.0 + away / widened) / widened
        value, slope = mass * value, mass * (slope + value * log_slope)
    return value + c * gamma, slope + c


def relaxed_cost(gamma, z0, mubar, c, rate, cost="mass"):
    """Return the cost Q(gamma) that a row minimises over its relaxation gamma >= 0.

    `gamma`, in units of the cavity precision, broadcasts against `z0` and `mubar`, the signed mean
    of the cavity and the signed centre of the relaxation over the standard deviation of the cavity.
    `c` is the penalty of a unit of gamma, `rate` that of wrong labels; `cost` says whether the
    divergence is of the unnormalised pair ("mass") or of the normalised one ("normalised").
    """
    return _cost_and_slope(gamma, z0, mubar, c, rate, cost)[0]


def relaxed_gamma(z0, mubar, c, rate, cost="mass"):
    """Return the relaxation gamma (n,) >= 0 that minimises the cost, row by row.

    Parameters as for `relaxed_cost`; c = np.inf relaxes nothing. Zero where exact moment matching
    is best. The divergence is non-negative, so that no gamma beyond Q(0) / c can win: the search is
    over a bounded interval, by a grid and by bisection about its best point. Negative values are
    not searched: their limit -1 makes every divergence vanish and the posterior meaningless.
    """
    z0, mubar = np.atleast_1d(np.asarray(z0, float)), np.atleast_1d(np.asarray(mubar, float))
    gamma = np.zeros(len(z0))
    if not np.isfinite(c):
        return gamma
    rows = np.flatnonzero(_steepest_fall(z0, mubar, rate, cost) > c)
    args = z0[rows], mubar[rows], c, rate, cost
    # more leaves nothing of the cavity: needed only for penalties near zero
    most = np.clip(relaxed_cost(0.0, *args) / c, 0.0, 1e3)
    best = np.argmin(relaxed_cost(_SHARES[:, None] * most, *args), axis=0)
    rows, most, best = (a[best > 0] for a in (rows, most, best))
    args = z0[rows], mubar[rows], c, rate, cost
    ends = best - 1, np.minimum(best + 1, len(_SHARES) - 1)
    low, high = (_SHARES[k] * most for k in ends)
    for _ in range(2):  # there may be two minima: nearer to the best one
        grid = low + np.linspace(0.0, 1.0, 17)[:, None] * (high - low)
        best = np.clip(np.argmin(relaxed_cost(grid, *args), axis=0), 1, 15)
        low, middle, high = (grid[best + k, np.arange(len(best))] for k in (-1, 0, 1))
    # a minimum is flat, and its place only known to half of the digits from the cost: by secants
    last, now = (1.0 + 1e-4) * middle, middle
    for _ in range(3):
        before, slope = _cost_and_slope(np.array([last, now]), *args)[1]
        with np.errstate(invalid="ignore", divide="ignore"):
            step = slope * (last - now) / (slope - before)
        last, now = now, now + np.where(np.abs(step) <= 0.03 * now, step, 0.0)
    gamma[rows] = now
    return gamma


def _steepest_fall(z0, mubar, rate, cost):
    """Return for each row a bound (n,) of how fast its divergence can fall anywhere in gamma.

    A row whose penalty is larger does not relax: most rows.
    """
    height, slope = _divergence_bounds(rate, cost)
    away = np.abs(mubar - z0)
    fall = 0.5 * slope * (away + np.abs(mubar))
    return fall + 0.5 * height * (1.0 + away**2) if cost == "mass" else fall


@lru_cache
def _divergence_bounds(rate, cost):
    """Return the largest divergence and the largest slope of it in z, of a mass of one or as is."""
    m, value, slope = _divergence(_Z, rate)
    if cost == "mass":
        mass = np.exp(m.log_z)
        value, slope = mass * value, mass * (slope + m.slope * value)
    margin = 1.05
    return margin * value.max(), margin * np.abs(slope).max()
