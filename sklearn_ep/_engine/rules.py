"""Update rules: how the tilted distribution of a row becomes its new site.

A rule is called with a factor, the labels and the marginals and answers with the undamped new
sites. It is all that dense, sparse and partitioned algorithms know of the likelihood.
"""

from typing import NamedTuple

import numpy as np

from .relaxed_cost import relaxed_cost, relaxed_gamma
from .sites import Cavity, Sites, cavity, log_site_mass

__all__ = ["MomentMatching", "Power", "Relaxed", "SiteUpdate", "relaxed_gamma"]

# Below this share of the cavity precision a site has no centre to relax towards.
_NO_CENTRE = 1e-2


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
        return _matched(factor, y, sites, cavity(sites, mean, var), extra_var)


def _matched(factor, y, sites, cav, extra_var, relaxation=None):
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


class Relaxed:
    """Relaxed moment matching (Qi and Guo 2012) for a `LabelErrorStep`.

    Each row may multiply its cavity by a factor exp(-b (g - m)^2 / 2) around the centre m of its
    old site before moments are matched, where that lowers the divergence by more than the penalty.
    The factor is no part of the posterior.

    Parameters
    ----------
    penalty : float
        Price of a unit of gamma = b times the variance of the cavity.
    cost : {"mass", "normalised"}
        See `relaxed_cost`.
    freeze_after : int
        Sweeps after which b and b m stay as they are, or are released for good where they no longer
        pay. Which rows relax may flip for ever, since m jumps where a site precision changes sign.

    Notes
    -----
    A site without precision has no centre: rows below one per cent of the precision of their cavity
    do not relax. That bounds the centres, so that penalties from about 50 on are moment matching.
    One object serves one run.
    """

    def __init__(self, penalty, cost, freeze_after):
        self.penalty, self.cost, self.freeze_after = penalty, cost, freeze_after
        self.n_sweeps = 0
        self.factors: tuple[np.ndarray, np.ndarray] | None = None

    def __call__(self, factor, y, sites, mean, var, extra_var=0.0):
        """Return the `SiteUpdate` of the rows; parameters as for `MomentMatching`."""
        cav = cavity(sites, mean, var)
        gamma, pull = self._relax(factor, y, sites, cav)
        self.n_sweeps += 1
        relaxed = Cavity(
            (cav.mean + pull * cav.var) / (1.0 + gamma), cav.var / (1.0 + gamma), cav.proper
        )
        return _matched(factor, y, sites, relaxed, extra_var, gamma)

    def _relax(self, factor, y, sites, cav):
        """Return gamma and b m of each row."""
        told = np.abs(sites.precision) * cav.var > _NO_CENTRE
        centre = np.divide(sites.shift, sites.precision, out=np.zeros_like(cav.mean), where=told)
        root = np.sqrt(cav.var)
        scalars = y * cav.mean / root, y * centre / root, self.penalty, factor.rate, self.cost
        if self.n_sweeps < self.freeze_after or self.factors is None:
            gamma = np.where(told, relaxed_gamma(*scalars), 0.0)
            self.factors = gamma / cav.var, gamma * centre / cav.var
            return gamma, self.factors[1]
        gamma = self.factors[0] * cav.var
        pays = relaxed_cost(gamma, *scalars) <= relaxed_cost(0.0, *scalars)
        self.factors = np.where(pays, self.factors[0], 0.0), np.where(pays, self.factors[1], 0.0)
        return np.where(pays, gamma, 0.0), self.factors[1]
