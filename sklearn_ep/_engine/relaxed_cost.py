"""How far a row should relax the matching of moments: the scalar problem of relaxed EP.

A relaxation factor exp(-b (g - m)^2 / 2) around the centre m of the old site multiplies the cavity
before moments are matched. In units of the cavity, gamma = b times its variance, all that the
factor does is to move the one number z on which the tilted distribution depends.
"""

import numpy as np
from scipy.special import erfcx

from .factors.step import LabelErrorStep, step_moments

__all__ = ["relaxed_cost", "relaxed_gamma", "relaxed_kl"]

# Shares of the largest gamma that can win where the cost is looked at first; denser at the small
# end, because z moves by gamma times the distance of the centre, which is not bounded.
_SHARES = np.concatenate([[0.0], np.geomspace(1e-4, 0.02, 12), np.linspace(0.03, 1.0, 36)])
# A relaxation beyond this leaves nothing of the cavity: needed only for penalties near zero.
_LARGEST = 1e3
# Around the best point grids of this many inner points, each narrower than the last by the inverse.
_FINE = np.arange(1, 16)[:, None] / 16.0
_REFINEMENTS = 2
_SECANTS = 3


def relaxed_kl(z, label_noise):
    """Return the Kullback-Leibler divergence from the tilted distribution to its moment match.

    Parameters
    ----------
    z : ndarray
        Mean of the cavity over its standard deviation, positive where it agrees with the label.
    label_noise : float
        Probability of a wrong label.
    """
    z = np.asarray(z, dtype=float)
    return _kl(z, step_moments(z, *LabelErrorStep(label_noise).log_weights), label_noise)


def _kl(z, m, label_noise):
    """Return the divergence at z from the `StepMoments` there."""
    if label_noise == 0:
        # - log Phi(z) and slope z / 2 both grow like z^2 / 2 on the wrong side; without it:
        below = np.minimum(z, 0.0)
        far = 0.5 * below * (m.slope + below) - np.log(0.5 * erfcx(-below / np.sqrt(2.0)))
        return 0.5 * np.log(m.spread) + np.where(z < 0, far, 0.5 * m.slope * z - m.log_z)
    log_right, log_wrong = LabelErrorStep(label_noise).log_weights
    entropy = log_right + m.wrong * (log_wrong - log_right) - m.log_z
    return entropy + 0.5 * (np.log(m.spread) + m.slope * z)


def relaxed_cost(gamma, z0, mubar, c, label_noise, cost="mass"):
    """Return the cost Q(gamma) that a row minimises over its relaxation gamma >= 0.

    Parameters
    ----------
    gamma : ndarray
        Relaxation in units of the cavity precision; broadcasts against the next two.
    z0, mubar : ndarray
        Signed mean of the cavity and signed centre of the relaxation over the standard deviation
        of the cavity.
    c : float
        Penalty of a unit of gamma.
    label_noise : float
    cost : {"mass", "normalised"}
        Divergence of the unnormalised pair, or of the normalised one.
    """
    widened = 1.0 + gamma
    root = np.sqrt(widened)
    z = (z0 + gamma * mubar) / root
    m = step_moments(z, *LabelErrorStep(label_noise).log_weights)
    value = _kl(z, m, label_noise)
    if cost == "mass":
        shift = (mubar - z0) ** 2 * (gamma / widened)
        value *= np.exp(m.log_z - 0.5 * shift) / root
    return value + c * gamma


def relaxed_gamma(z0, mubar, c, label_noise, cost="mass"):
    """Return the relaxation gamma >= 0 that minimises the cost, row by row.

    Parameters
    ----------
    z0, mubar : ndarray of shape (n,)
        See `relaxed_cost`.
    c : float
        Penalty; np.inf relaxes nothing.
    label_noise : float
    cost : {"mass", "normalised"}, default="mass"

    Returns
    -------
    gamma : ndarray of shape (n,)
        Zero where exact moment matching is best.

    Notes
    -----
    The divergence is non-negative, so that no gamma beyond Q(0) / c can win: the search is over a
    bounded interval, by a grid and by finer ones around its best point. Negative values are not
    searched: their limit -1 makes every divergence vanish and the posterior meaningless.
    """
    z0, mubar = np.atleast_1d(np.asarray(z0, float)), np.atleast_1d(np.asarray(mubar, float))
    if np.isinf(c):
        return np.zeros(len(z0))
    at_zero = relaxed_cost(0.0, z0, mubar, c, label_noise, cost)
    grid = _SHARES[:, None] * np.clip(at_zero / c, 0.0, _LARGEST)
    costs = relaxed_cost(grid, z0, mubar, c, label_noise, cost)
    best = np.argmin(costs, axis=0)
    gamma = np.zeros(len(z0))
    rows = np.flatnonzero(best > 0)
    if len(rows):

        def value(g):
            return relaxed_cost(g, z0[rows], mubar[rows], c, label_noise, cost)

        first = grid[best[rows], rows]
        high = grid[np.minimum(best[rows] + 1, len(_SHARES) - 1), rows]
        best = _refined(value, first, grid[best[rows] - 1, rows], high)
        args = z0[rows], mubar[rows], c, label_noise, cost
        gamma[rows] = _polished(best, lambda g: _cost_slope(g, *args))
    return gamma


def _refined(value, best, low, high):
    """Minimise a function of each row between low and high by ever finer grids around the best."""
    rows = np.arange(len(best))
    for _ in range(_REFINEMENTS):
        grid = np.vstack([low + _FINE * (high - low), best])
        k = np.argmin(value(grid), axis=0)
        best = grid[k, rows]
        width = _FINE[0, 0] * (high - low)
        low, high = np.maximum(best - width, 0.0), best + width
    return best


def _polished(gamma, slope):
    """Return the roots of the slope next to gamma by secant steps.

    A minimum is flat: its place is only known to half of the digits from the cost, and rounding
    would show in everything that follows.
    """
    last = gamma * (1.0 + 1e-4)
    last_slope, now = slope(np.array([last, gamma]))
    for k in range(_SECANTS):
        if k:
            now = slope(gamma)
        with np.errstate(invalid="ignore", divide="ignore"):
            step = now * (last - gamma) / (now - last_slope)
        last, last_slope = gamma, now
        gamma = gamma + np.where(np.abs(step) <= 0.03 * gamma, step, 0.0)
    return gamma


def _kl_slope(z, m, label_noise):
    """Return the derivative of the divergence in z from the `StepMoments` there."""
    beta_slope = m.slope * m.spread - m.beta * (m.slope + z)
    value = -0.5 * (m.slope + m.beta * z + beta_slope / m.spread)
    if label_noise == 0:
        return value
    height = m.slope / (1.0 - 2.0 * label_noise)
    right_slope = height * ((1.0 - label_noise) * m.wrong + label_noise * (1.0 - m.wrong))
    return value + np.log((1.0 - label_noise) / label_noise) * right_slope


def _cost_slope(gamma, z0, mubar, c, label_noise, cost):
    """Return the derivative of `relaxed_cost` in gamma."""
    widened = 1.0 + gamma
    root = np.sqrt(widened)
    z = (z0 + gamma * mubar) / root
    m = step_moments(z, *LabelErrorStep(label_noise).log_weights)
    moved = (mubar - 0.5 * z / root) / root
    slope = _kl_slope(z, m, label_noise) * moved
    if cost == "mass":
        away = (mubar - z0) ** 2
        mass = np.exp(m.log_z - 0.5 * away * (gamma / widened)) / root
        log_slope = m.slope * moved - 0.5 * (1.0 + away / widened) / widened
        slope = mass * (slope + _kl(z, m, label_noise) * log_slope)
    return slope + c
