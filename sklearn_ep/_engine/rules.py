"""Update rules: how the tilted distribution of a row becomes its new site.

A rule is called with a factor, the labels and the marginals and answers with the undamped new
sites. It is all that dense, sparse and partitioned algorithms know of the likelihood.
"""

from typing import Any

import numpy as np

from .contracts import SiteUpdate
from .sites import Cavity, Sites, copy_cavity, log_site_mass


class MomentMatching:
    """The rule of expectation propagation (Minka 2001).

    The new site makes cavity times site match mean and variance of the tilted distribution:
    precision = h / (1 - c h), shift = (g + a h) / (1 - c h) for a cavity N(a, c) and derivatives
    g and -h of log Z.
    """

    exponent = 1.0

    def __call__(
        self,
        factor: Any,
        y: Any,
        sites: Sites,
        mean: Any,
        var: Any,
        extra_var: Any = 0.0,
        weight: Any = 1.0,
    ) -> SiteUpdate:
        """Return the `SiteUpdate` of the rows; parameters as for `contracts.Rule`."""
        own = factor if self.exponent == 1.0 else factor.powered(self.exponent)
        cav = copy_cavity(sites, mean, var, weight, self.exponent)
        return match_moments(own, y, sites, cav, extra_var, self.exponent)


def match_moments(
    factor: Any,
    y: Any,
    sites: Sites,
    cav: Cavity,
    extra_var: Any,
    exponent: float = 1.0,
    relaxation: np.ndarray | None = None,
) -> SiteUpdate:
    """Match the moments of factor times cavity.

    With an exponent u the factor is t^u and the cavity lacks that share of the site: its new site
    and its term in the log evidence are those of t^u, over u.
    """
    log_z, g, h = factor.tilted(y, cav.mean, cav.var + extra_var)
    left = exponent * factor.contraction(y, cav.mean, cav.var, extra_var, h)
    new = Sites(h / left, (g + cav.mean * h) / left)
    log_term = (log_z - log_site_mass(sites, cav.mean, cav.var, exponent)) / exponent
    slopes = g / exponent, 0.5 * (g**2 - h) / exponent
    return SiteUpdate(new, log_term, *slopes, cav.removed, relaxation)


class Power(MomentMatching):
    """Power EP (Minka 2004): match moments with a fraction of the factor.

    Parameters
    ----------
    exponent : float
        In (0, 1]; 1 is moment matching, towards 0 it becomes variational inference.

    Notes
    -----
    The fraction is taken of the factor of the latent value itself. Where that is only known up to
    an extra variance (inducing points), it is averaged after the power is taken, so that exponent 1
    is FITC and the limit 0 the variational bound (Bui, Yan and Turner 2017).
    """

    factor_needs = ("powered",)

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent


def rule_of_power(power: float) -> MomentMatching:
    """Return the rule that matches a share of each factor, moment matching for all of it."""
    return MomentMatching() if power == 1 else Power(power)
