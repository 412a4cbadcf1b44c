"""Update rules: how the tilted distribution of a row becomes its new site.

A rule is called with a factor, the labels and the marginals and answers with the undamped new
sites. It is all that dense, sparse and partitioned algorithms know of the likelihood.
"""

from typing import Any

import numpy as np

from .contracts import SiteUpdate
from .sites import Cavity, Sites, cavity, log_site_mass

__all__ = ["MomentMatching", "Power", "match_moments"]


class MomentMatching:
    """The rule of expectation propagation (Minka 2001).

    The new site makes cavity times site match mean and variance of the tilted distribution:
    precision = h / (1 - c h), shift = (g + a h) / (1 - c h) for a cavity N(a, c) and derivatives
    g and -h of log Z.
    """

    def __call__(
        self, factor: Any, y: Any, sites: Sites, mean: Any, var: Any, extra_var: Any = 0.0
    ) -> SiteUpdate:
        """Return the `SiteUpdate` of the rows; parameters as for `contracts.Rule`."""
        return match_moments(factor, y, sites, cavity(sites, mean, var), extra_var)


def match_moments(
    factor: Any,
    y: Any,
    sites: Sites,
    cav: Cavity,
    extra_var: Any,
    relaxation: np.ndarray | None = None,
) -> SiteUpdate:
    """Match the moments of factor times cavity."""
    log_z, g, h = factor.tilted(y, cav.mean, cav.var + extra_var)
    left = factor.contraction(y, cav.mean, cav.var, extra_var, h)
    return SiteUpdate(
        Sites(h / left, (g + cav.mean * h) / left),
        log_z - log_site_mass(sites, cav.mean, cav.var),
        g,
        h,
        int(np.sum(~cav.proper)),
        relaxation,
    )


class Power:
    """Power EP (Minka 2004): match moments with a fraction of the factor.

    Parameters
    ----------
    exponent : float
        In (0, 1]; 1 is moment matching.
    """

    factor_needs = ("powered",)

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def __call__(
        self, factor: Any, y: Any, sites: Sites, mean: Any, var: Any, extra_var: Any = 0.0
    ) -> SiteUpdate:
        """Return the `SiteUpdate` of the rows; parameters as for `contracts.Rule`."""
        u = self.exponent
        cav = cavity(sites, mean, var, u)
        powered = factor.powered(u)
        log_z, g, h = powered.tilted(y, cav.mean, cav.var + extra_var)
        left = u * powered.contraction(y, cav.mean, cav.var, extra_var, h)
        new = Sites(h / left, (g + cav.mean * h) / left)
        log_term = (log_z - log_site_mass(sites, cav.mean, cav.var, u)) / u
        return SiteUpdate(new, log_term, g, h, int(np.sum(~cav.proper)))
