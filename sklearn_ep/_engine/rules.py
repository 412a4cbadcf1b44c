"""Update rules: how the tilted distribution of a row becomes its new site.

A rule is called with a factor, the labels and the marginals and answers with the undamped new
sites. It is all that dense, sparse and partitioned algorithms know of the likelihood.
"""

from typing import NamedTuple

import numpy as np

from .sites import Sites, cavity, log_site_mass

__all__ = ["MomentMatching", "Power", "SiteUpdate", "match_moments"]


class SiteUpdate(NamedTuple):
    """What one pass over some rows gives.

    sites are the undamped targets; log_term (n,) is the contribution of each row to the log
    evidence; gradient and curvature are those of the tilted log Z in the cavity mean; n_improper
    counts rows whose cavity was improper and was replaced by the marginal; relaxation (n,) is the
    dimensionless relaxation of each row where the rule knows one.
    """

    sites: Sites
    log_term: np.ndarray
    gradient: np.ndarray
    curvature: np.ndarray
    n_improper: int
    relaxation: np.ndarray | None = None


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
        return match_moments(factor, y, sites, cavity(sites, mean, var), extra_var)


def match_moments(factor, y, sites, cav, extra_var, relaxation=None):
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

    def __init__(self, exponent):
        self.exponent = exponent

    def __call__(self, factor, y, sites, mean, var, extra_var=0.0):
        """Return the `SiteUpdate` of the rows; parameters as for `MomentMatching`."""
        u = self.exponent
        cav = cavity(sites, mean, var, u)
        powered = factor.powered(u)
        log_z, g, h = powered.tilted(y, cav.mean, cav.var + extra_var)
        left = u * powered.contraction(y, cav.mean, cav.var, extra_var, h)
        new = Sites(h / left, (g + cav.mean * h) / left)
        log_term = (log_z - log_site_mass(sites, cav.mean, cav.var, u)) / u
        return SiteUpdate(new, log_term, g, h, int(np.sum(~cav.proper)))
