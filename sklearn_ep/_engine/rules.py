"""Update rules: how the tilted distribution of a row becomes its new site.

A rule is called with a factor, the labels and the marginals and answers with the undamped new
sites. It is all that dense, sparse and partitioned algorithms know of the likelihood.
"""

from typing import NamedTuple

import numpy as np

from .sites import Sites, cavity, log_site_mass

__all__ = ["MomentMatching", "Power", "SiteUpdate"]


class SiteUpdate(NamedTuple):
    """What one pass over some rows gives.

    sites are the undamped targets; log_term (n,) is the contribution of each row to the log
    evidence; gradient and curvature are those of the tilted log Z in the cavity mean; n_improper
    counts rows whose cavity was improper and was replaced by the marginal.
    """

    sites: Sites
    log_term: np.ndarray
    gradient: np.ndarray
    curvature: np.ndarray
    n_improper: int


class MomentMatching:
    """The rule of expectation propagation (Minka 2001).

    The new site makes cavity times site match mean and variance of the tilted distribution:
    precision = h / (1 - c h), shift = (g + a h) / (1 - c h) for a cavity N(a, c) and derivatives
    g and -h of log Z.
    """

    def __call__(self, factor, y, sites, mean, var, extra_var=0.0):
        """Return the `SiteUpdate` of the rows.

        Parameters
        ----------
        factor : Factor
        y : ndarray of shape (n,)
        sites : Sites
        mean, var : ndarray of shape (n,)
            Marginals of the variables that carry the sites.
        extra_var : ndarray of shape (n,) or float, default=0.0
            Variance of the latent value given that variable (inducing-point models).
        """
        cav = cavity(sites, mean, var)
        log_z, g, h = factor.tilted(y, cav.mean, cav.var + extra_var)
        left = 1.0 - cav.var * h
        new = Sites(h / left, (g + cav.mean * h) / left)
        return SiteUpdate(
            new,
            log_z - log_site_mass(sites, cav.mean, cav.var),
            g,
            h,
            int(np.sum(~cav.proper)),
        )


class Power:
    """Power EP (Minka 2004): match moments with a fraction of the factor.

    Parameters
    ----------
    exponent : float
        In (0, 1]; 1 is moment matching.
    """

    def __init__(self, exponent):
        self.exponent = exponent

    def __call__(self, factor, y, sites, mean, var, extra_var=0.0):
        """Return the `SiteUpdate` of the rows; parameters as for `MomentMatching`."""
        u = self.exponent
        cav = cavity(sites, mean, var, u)
        log_z, g, h = factor.powered(u).tilted(y, cav.mean, cav.var + extra_var)
        left = u * (1.0 - cav.var * h)
        new = Sites(h / left, (g + cav.mean * h) / left)
        log_term = (log_z - log_site_mass(sites, cav.mean, cav.var, u)) / u
        return SiteUpdate(new, log_term, g, h, int(np.sum(~cav.proper)))
