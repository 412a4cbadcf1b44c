"""The rule of relaxed EP, and the scalar problem behind it: how far a row should relax.

A relaxation factor exp(-b (g - m)^2 / 2) around the centre m of the old site multiplies the cavity
before moments are matched. In units of the cavity, gamma = b times its variance, all that the
factor does is to move the one number z on which the tilted distribution depends.
"""

from functools import lru_cache

import numpy as np
from scipy.special import erfcx

from ..._engine.rules import match_moments
from ..._engine.sites import Cavity, cavity
from .step import LabelErrorStep, step_moments

# Shares of the largest gamma that can win where the cost is looked at first; denser at the small
# end, because z moves by gamma times the distance of the centre, which is not bounded.
_SHARES = np.concatenate([[0.0], np.geomspace(1e-4, 0.02, 12), np.linspace(0.03, 1.0, 36)])
# Around the best point grids of this many inner points, each narrower than the last by the inverse.
_FINE = np.arange(1, 16)[:, None] / 16.0
# Where the divergence is looked at for bounds that hold everywhere: beyond it has settled, and what
# is between two points is within the margin, also for rates of 1e-300.
_Z = np.linspace(-40.0, 10.0, 4001)


def _kl(z, m, label_noise):
    """Return the Kullback-Leibler divergence from the tilted distribution to its moment match.

    `m` are the `StepMoments` at z, the mean of the cavity over its standard deviation.
    """
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

    `gamma`, in units of the cavity precision, broadcasts against `z0` and `mubar`, the signed mean
    of the cavity and the signed centre of the relaxation over the standard deviation of the cavity.
    `c` is the penalty of a unit of gamma; `cost` says whether the divergence is of the unnormalised
    pair ("mass") or of the normalised one ("normalised").
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
    """Return the relaxation gamma (n,) >= 0 that minimises the cost, row by row.

    Parameters as for `relaxed_cost`; c = np.inf relaxes nothing. Zero where exact moment matching
    is best. The divergence is non-negative, so that no gamma beyond Q(0) / c can win: the search is
    over a bounded interval, by a grid and by finer ones around its best point. Negative values are
    not searched: their limit -1 makes every divergence vanish and the posterior meaningless.
    """
    z0, mubar = np.atleast_1d(np.asarray(z0, float)), np.atleast_1d(np.asarray(mubar, float))
    gamma = np.zeros(len(z0))
    if np.isfinite(c):
        rows = np.flatnonzero(steepest_fall(z0, mubar, label_noise, cost) > c)
        gamma[rows] = _searched(z0[rows], mubar[rows], c, label_noise, cost)
    return gamma


def steepest_fall(z0, mubar, label_noise, cost):
    """Return for each row a bound (n,) of how fast its divergence can fall anywhere in gamma.

    A row whose penalty is larger does not relax: most rows.
    """
    height, slope = _divergence_bounds(label_noise, cost)
    away = np.abs(mubar - z0)
    fall = 0.5 * slope * (away + np.abs(mubar))
    return fall + 0.5 * height * (1.0 + away**2) if cost == "mass" else fall


@lru_cache
def _divergence_bounds(label_noise, cost):
    """Return the largest divergence and the largest slope of it in z, of a mass of one or as is."""
    m = step_moments(_Z, *LabelErrorStep(label_noise).log_weights)
    value, slope = _kl(_Z, m, label_noise), _kl_slope(_Z, m, label_noise)
    if cost == "mass":
        mass = np.exp(m.log_z)
        value, slope = mass * value, mass * (slope + m.slope * value)
    margin = 1.05
    return margin * value.max(), margin * np.abs(slope).max()


def _searched(z0, mubar, c, label_noise, cost):
    """Return the relaxation gamma (n,) of `relaxed_gamma` by a search, for a finite penalty."""
    at_zero = relaxed_cost(0.0, z0, mubar, c, label_noise, cost)
    # more leaves nothing of the cavity: needed only for penalties near zero
    grid = _SHARES[:, None] * np.clip(at_zero / c, 0.0, 1e3)
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
    for _ in range(2):
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
    for k in range(3):
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


class Relaxed:
    """Relaxed moment matching (Qi and Guo 2012) for a `LabelErrorStep`; one object serves one run.

    Each row may multiply its cavity by a factor exp(-b (g - m)^2 / 2) around the centre m of its
    old site before moments are matched, where that lowers the divergence by more than the penalty,
    the price of a unit of gamma = b times the variance of the cavity. The factor is no part of the
    posterior. `cost` is that of `relaxed_cost`.

    `memory` holds b and b m of the rows. After `freeze_after` sweeps they stay as they are, or are
    released for good where they no longer pay. Which rows relax may flip for ever, since m jumps
    where a site precision changes sign.

    A site without precision has no centre: rows below one per cent of the precision of their cavity
    do not relax. That bounds the centres, so that penalties from about 50 on are moment matching.
    """

    factor_needs = ("rate",)
    exponent = 1.0

    def __init__(self, penalty, cost, freeze_after):
        self.penalty, self.cost, self.freeze_after = penalty, cost, freeze_after
        self.n_sweeps = 0
        self.memory: tuple[np.ndarray, np.ndarray] | None = None

    def resumed(self, memory):
        """Return the rule for some of the rows, of which b and b m are given as (2, n)."""
        rule = Relaxed(self.penalty, self.cost, self.freeze_after)
        rule.n_sweeps = self.n_sweeps
        rule.memory = (memory[0], memory[1]) if self.n_sweeps else None
        return rule

    def advance(self):
        """Count a sweep whose rows were all visited by resumed rules."""
        self.n_sweeps += 1

    def __call__(self, factor, y, sites, mean, var, extra_var=0.0):
        """Return the `SiteUpdate` of the rows; parameters as for `MomentMatching`."""
        cav = cavity(sites, mean, var)
        gamma, pull = self._relax(factor, y, sites, cav)
        self.advance()
        mean = (cav.mean + pull * cav.var) / (1.0 + gamma)
        relaxed = Cavity(mean, cav.var / (1.0 + gamma), cav.proper)
        return match_moments(factor, y, sites, relaxed, extra_var, relaxation=gamma)

    def _relax(self, factor, y, sites, cav):
        """Return gamma and b m of each row."""
        told = np.abs(sites.precision) * cav.var > 1e-2
        centre = np.divide(sites.shift, sites.precision, out=np.zeros_like(cav.mean), where=told)
        root = np.sqrt(cav.var)
        scalars = y * cav.mean / root, y * centre / root, self.penalty, factor.rate, self.cost
        if self.n_sweeps < self.freeze_after or self.memory is None:
            gamma = np.where(told, relaxed_gamma(*scalars), 0.0)
            self.memory = gamma / cav.var, gamma * centre / cav.var
            return gamma, self.memory[1]
        gamma = self.memory[0] * cav.var
        pays = relaxed_cost(gamma, *scalars) <= relaxed_cost(0.0, *scalars)
        self.memory = np.where(pays, self.memory[0], 0.0), np.where(pays, self.memory[1], 0.0)
        return np.where(pays, gamma, 0.0), self.memory[1]
