"""Rules for sites on g = f + noise where f is seen through inducing points, row by row.

Passes over rows keep sites on t, the mean of f given the inducing values. With e the noise plus the
variance of f given them, a site (tau, nu) on g is the site (tau, nu) / (1 + e tau) on t.
"""

import numpy as np

from ..._engine.gaussian import ImproperPosterior
from ..._engine.sites import Sites
from .noise import noisy_marginals

__all__ = ["OfNoise", "on_means", "on_noisy"]

# Halvings of a step after which a site that leaves its noise improper stays where it was.
_HALVINGS = 12


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
    for _ in range(_HALVINGS):
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
