"""Rules of the sites of labels that may be wrong: relaxed moment matching, and sites under noise.

Sites on g = f + noise become sites on f, so that any structure of f serves, and copies of a row
share f while each has a noise of its own. Where f is seen through inducing points, passes over rows
keep sites on t, the mean of f given the inducing values: with e the noise plus the variance of f
given them, a site (tau, nu) on g is the site (tau, nu) / (1 + e tau) on t.
"""

from functools import cached_property

import numpy as np

from ..._engine.gaussian import ImproperPosterior
from ..._engine.rules import match_moments
from ..._engine.sites import Cavity, Sites, cavity
from .step import relaxed_cost, relaxed_gamma


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


def noisy_marginals(precision, shift, noise, mean, var):
    """Return mean and variance of g = f + noise given f ~ N(mean, var) and a site on g.

    And the log mass that the site adds. Raises an `ImproperPosterior` where the site leaves the
    noise without a proper distribution.
    """
    left = 1.0 + noise * precision
    if np.any(left <= 0):
        raise ImproperPosterior("the noise of a row has no variance left")
    log_mass = 0.5 * (noise * shift**2 / left - np.log1p(noise * precision))
    return (mean + noise * shift) / left, noise / left + var / left**2, log_mass


class LatentNoiseState:
    """Posterior of g = f + noise given all sites.

    `mean` and `var` (n,) are the marginals of g, of one copy of each row, `latent` is the state of
    the structure of f, `log_evidence` the log of the integral of prior times sites, and `extra_var`
    0: the sites are on g itself.
    """

    extra_var = 0.0

    def __init__(self, structure, noise, weight, precision, shift):
        tau, nu = precision / weight, shift / weight
        left = 1.0 + noise * tau
        if np.any(left <= 0):
            raise ImproperPosterior("the noise of a row has no variance left")
        self.latent = inner = structure.posterior(precision / left, shift / left)
        self.mean, self.var, own = noisy_marginals(tau, nu, noise, inner.mean, inner.var)
        self.log_evidence = inner.log_evidence + weight @ own
        self.site_precision, self._site_shift, self._weight = tau, nu, weight

    @cached_property
    def noise_slope(self):
        """Derivative of the log evidence in the noise of each row, at a fixed point, (n,)."""
        tau = self.site_precision
        alpha = self._site_shift - tau * self.mean
        return 0.5 * self._weight * (alpha**2 - tau + tau**2 * self.var)


class LatentNoise:
    """Structure of g = f + noise: of one variance for all rows, with `weight` (n,) copies of each.

    An attribute `extra_var` (n,) of the structure of f, the variance of f given what it keeps,
    counts as noise.
    """

    def __init__(self, structure, noise, weight):
        self.structure, self.weight = structure, weight
        self.noise = noise + getattr(structure, "extra_var", 0.0)

    def posterior(self, precision, shift):
        """Return the state for site parameters (n,), copies of tied rows counted."""
        return LatentNoiseState(self.structure, self.noise, self.weight, precision, shift)

    def shared_covariance(self, state):
        """Return the posterior covariance (n, n) of g between rows, and between copies of a row."""
        left = 1.0 + self.noise * state.site_precision
        return self.structure.covariance(state.latent) / left / left[:, None]


def on_noisy(sites, noise):
    """Return sites on g from sites on t; raise an `ImproperPosterior` where there is none."""
    left = 1.0 - noise * sites.precision
    if np.any(left <= 0):
        raise ImproperPosterior("a row has more precision than its noise allows")
    return Sites(sites.precision / left, sites.shift / left)


def on_means(sites, noise):
    """Return sites on t from sites on g."""
    left = 1.0 + noise * sites.precision
    return Sites(sites.precision / left, sites.shift / left)


def _proper_step(old, new, noise):
    """Return new sites on g, at most half the way to improper noise, and how many were beyond."""
    bad = 1.0 + noise * new.precision <= 0
    fall = np.where(bad, old.precision - new.precision, 1.0)
    share = np.where(bad, 0.5 * (old.precision + 1.0 / noise) / fall, 1.0)
    pairs = zip(old, new, strict=True)
    return Sites(*((1.0 - share) * a + share * b for a, b in pairs)), int(np.sum(bad))


class OfNoise:
    """A rule for sites on g, asked and answered in sites on t.

    `noise` is the variance of the white noise; the extra variances of the rows are added to it.
    """

    def __init__(self, rule, noise):
        self.rule, self.noise = rule, noise
        self.exponent = rule.exponent
        self.factor_needs = getattr(rule, "factor_needs", ())

    @property
    def memory(self):
        """What the rule keeps of the rows it has just seen."""
        return self.rule.memory

    def resumed(self, memory):
        """Return the rule for some of the rows, of which the memory (k, n) is given."""
        return OfNoise(self.rule.resumed(memory), self.noise)

    def advance(self):
        """Count a sweep."""
        self.rule.advance()

    def __call__(self, factor, y, sites, mean, var, extra_var=0.0):
        """Return the `SiteUpdate` of the rows; parameters as for `MomentMatching`.

        Its derivatives are those of the evidence at given sites: exact at a fixed point.
        """
        noise = self.noise + extra_var
        own = on_noisy(sites, noise)
        g_mean, g_var, log_mass = noisy_marginals(own.precision, own.shift, noise, mean, var)
        update = self.rule(factor, y, own, g_mean, g_var)
        new, n_bad = _proper_step(own, update.sites, noise)
        alpha = sites.shift - sites.precision * mean
        slope = 0.5 * (alpha**2 - sites.precision + sites.precision**2 * var)
        return update._replace(
            sites=on_means(new, noise),
            log_term=update.log_term + log_mass,
            gradient=alpha,
            noise_slope=slope,
            n_improper=update.n_improper + n_bad,
        )
