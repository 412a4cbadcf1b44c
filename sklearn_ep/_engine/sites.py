"""Scalar Gaussian sites and their cavities, as arrays over the rows.

Site i is exp(shift_i f - precision_i f^2 / 2). With sample weights a row stands for `weight` tied
copies: the cavity removes one copy, the posterior counts the site `weight` times. A row is left
out with all its copies, since one that stays would predict it.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

# One copy of a row of weight w; all of the row where w is below one.
one_copy = partial(np.minimum, 1.0)
# Least share of the precision of the other rows that a cavity keeps in any direction. Of 108 fits
# of several classes to 27 tables, half of them by random weights, .1 leaves four that do not settle
# and .3 none, as of 46 of two classes; one would take less than a copy out of every row of weight
# below one.
_KEPT = 0.3


class Sites(NamedTuple):
    """Natural parameters of the sites: precision (n,) and shift = precision times mean (n,).

    Of several classes jointly (n, K): precisions of the links to the winner, see `class_sites`.
    """

    precision: np.ndarray
    shift: np.ndarray

    @classmethod
    def zero(cls, n: int) -> "Sites":
        """Return n sites that say nothing."""
        return cls(np.zeros(n), np.zeros(n))


def part_way(old: Any, new: Any, share: float) -> Any:
    """Return the sites a share of the way to new ones, of any kind."""
    return type(old)(*(a + share * (b - a) for a, b in zip(old, new, strict=True)))


class Cavity(NamedTuple):
    """Mean and variance without so many copies of the site, `removed`, or such a share of it.

    Rows with an improper cavity carry the posterior itself instead, and removed is zero there.
    """

    mean: np.ndarray
    var: np.ndarray
    removed: np.ndarray


def cavity(sites: Sites, mean: np.ndarray, var: np.ndarray, fraction: Any = 1.0) -> Cavity:
    """Remove a fraction of each site, or so many copies, from its marginal.

    Parameters
    ----------
    sites : Sites
    mean, var : ndarray of shape (n,)
        Marginals of the posterior approximation.
    fraction : float or ndarray of shape (n,), default=1.0
        Share of the site to remove: less than one for power EP, all copies to leave a row out.

    Returns
    -------
    Cavity
        Improper cavities (stale sites after a change of hyperparameters, or sites of negative
        precision nearby) are replaced by the marginal and reported in `removed`.
    """
    left = 1.0 - fraction * sites.precision * var
    proper = left > 0
    safe = np.where(proper, left, 1.0)
    shifted = np.where(proper, mean - fraction * var * sites.shift, mean)
    return Cavity(shifted / safe, var / safe, np.where(proper, fraction, 0.0))


def removable(share: np.ndarray, weight: Any) -> np.ndarray:
    """Return the copies (n,) of each site that its cavity can lack: one, or less.

    A row of weight w below one has less of its site in the posterior than one copy. With z the
    `share` (n,) of the marginal's precision that a copy of the site is, the other rows have 1 - w z
    of it. As many copies c go as leave `_KEPT` of that, 1 - c z >= `_KEPT` (1 - w z), which is
    never fewer than w. The answer is continuous in the site. If instead the marginal replaced a
    cavity once it is lost, sites of such rows would go to and fro across that edge.
    """
    light = np.minimum(weight, 1.0)
    least = (1.0 - _KEPT) / (1.0 - _KEPT * light)
    fewer = (1.0 - _KEPT) / np.maximum(share, least) + _KEPT * light
    return np.where(np.less(weight, 1.0), fewer, 1.0)


def copy_cavity(
    sites: Sites, mean: np.ndarray, var: np.ndarray, weight: Any = 1.0, exponent: float = 1.0
) -> Cavity:
    """Return the cavity of one copy of each row, or of less where its weight is below one.

    weight (n,) are the copies of the sites in the posterior; of a share of the site, `exponent`, no
    more than that is removed. Other parameters as for `cavity`.
    """
    copies = np.minimum(removable(sites.precision * var, weight), exponent)
    return cavity(sites, mean, var, copies)


def log_site_mass(
    sites: Sites, mean: np.ndarray, var: np.ndarray, fraction: float = 1.0
) -> np.ndarray:
    """Return log of the integral of N(f; mean, var) site(f)^fraction, shape (n,)."""
    tau, nu = fraction * sites.precision, fraction * sites.shift
    left = 1.0 + tau * var
    return -0.5 * np.log(left) + (nu**2 * var + 2.0 * nu * mean - tau * mean**2) / (2.0 * left)


def site_metric(var: np.ndarray) -> np.ndarray:
    """Return the weights (2, n) that make changes of precision and shift dimensionless."""
    return np.array([var, np.sqrt(var)])


def site_change(old: Sites, new: Sites, var: np.ndarray) -> float:
    """Return the largest dimensionless change of any site: the residual of a sweep."""
    precisions = np.abs(new.precision - old.precision) * var
    shifts = np.abs(new.shift - old.shift) * np.sqrt(var)
    return float(max(precisions.max(initial=0.0), shifts.max(initial=0.0)))
