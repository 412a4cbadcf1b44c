"""White noise between the latent values and the variables that carry the sites.

Sites on g = f + noise become sites on f, so that any structure of f serves, and copies of a row
share f while each has a noise of its own. Where f is seen through inducing points, passes over rows
keep sites on t, the mean of f given the inducing values: with e the noise plus the variance of f
given them, a site (tau, nu) on g is the site (tau, nu) / (1 + e tau) on t.
"""

from functools import cached_property

import numpy as np

from ..._engine.gaussian import ImproperPosterior
from ..._engine.sites import Sites


def noisy_marginals(precision, shift, noise, mean, var):
    """Return mean and variance of g = f + noise given f ~ N(mean, var) and a site on g.

    And the log mass that the site adds. Raises an `ImproperPosterior` where the site leaves the
    noise without a proper distribution.
    """
    left = 1.0 + noise * precision
    if np.any(left <= 0):
        raise ImproperPosterior("a site leaves its own noise without a proper distribution")
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
            raise ImproperPosterior("a site leaves its own noise without a proper distribution")
        self.latent = inner = structure.posterior(precision / left, shift / left)
        self.mean, self.var, own = noisy_marginals(tau, nu, noise, inner.mean, inner.var)
        self.log_evidence = inner.log_evidence + weight @ own
        self._sites = weight, tau, nu

    @cached_property
    def noise_slope(self):
        """Derivative of the log evidence in the noise of each row, at a fixed point, (n,)."""
        weight, tau, nu = self._sites
        alpha = nu - tau * self.mean
        return 0.5 * weight * (alpha**2 - tau + tau**2 * self.var)


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


def on_noisy(sites, noise):
    """Return sites on g from sites on t; raise an `ImproperPosterior` where there is none."""
    left = 1.0 - noise * sites.precision
    if np.any(left <= 0):
        raise ImproperPosterior("a site on the projected value is sharper than the noise allows")
    return Sites(sites.precision / left, sites.shift / left)


def on_means(sites, noise):
    """Return sites on t from sites on g."""
    left = 1.0 + noise * sites.precision
    return Sites(sites.precision / left, sites.shift / left)


def _proper_step(old, new, noise):
    """Return new sites on g, steps halved where they leave the noise improper, and their number."""
    bad = 1.0 + noise * new.precision <= 0
    n_bad = int(np.sum(bad))
    for _ in range(12):  # then a site stays where it was
        if not np.any(bad):
            return new, n_bad
        new = Sites(*(np.where(bad, 0.5 * (a + b), b) for a, b in zip(old, new, strict=True)))
        bad = 1.0 + noise * new.precision <= 0
    return Sites(*(np.where(bad, a, b) for a, b in zip(old, new, strict=True))), n_bad


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
