"""White noise between the latent values and the variables that carry the sites.

Sites on g = f + noise become sites on f, so that any structure of f serves, and copies of a row
share f while each has a noise of its own.
"""

from functools import cached_property

import numpy as np

from ..._engine.gaussian import ImproperPosterior

__all__ = ["LatentNoise", "LatentNoiseState", "noisy_marginals"]


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
