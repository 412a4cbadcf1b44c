"""Super-Gaussian sites t(s) = exp(shift s + g(s^2)) and their two variational bounds.

Both bounds are one function of the mean s and the variance z of a linear predictor: a penalty f
that is convex in s, its two derivatives, and the precision of the Gaussian site that is tangent
there. What minimises sum f and what iterates over z does not know which bound it serves.

local
    f(s, z) = -g(z + s^2) - shift s, precision -2 g'(z + s^2): the quadratic lower bound of t that
    touches at s^2 + z (Jaakkola and Jordan 2000; Nickisch and Seeger 2009, whose implicit h* has
    this closed form for every super-Gaussian site).
kl
    f(s, z) = -E log t(S), S ~ N(s, z), precision f'': the Kullback-Leibler bound of a Gaussian
    posterior (Opper and Archambeau 2009).
"""

from typing import Any, NamedTuple

import numpy as np

from .quadrature import logistic_mixture

BOUNDS = ("local", "kl")
_TINY = 1e-300


class Penalty(NamedTuple):
    """Penalty f of each site, its slope and curvature in s, and its tangent precision."""

    value: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray
    precision: np.ndarray


def _tanh_over(v: np.ndarray) -> np.ndarray:
    """Return tanh(v) / v, smooth at zero."""
    small = v < 1e-4
    safe = np.where(small, 1.0, v)
    return np.where(small, 1.0 - v * v / 3.0, np.tanh(safe) / safe)


def _density(v: np.ndarray) -> np.ndarray:
    """Return the logistic density at 2 v, without overflow."""
    e = np.exp(-2.0 * v)
    return e / (1.0 + e) ** 2


def _local_precision(x: np.ndarray) -> np.ndarray:
    """Return -2 g'(x) of the logistic site."""
    return 0.25 * _tanh_over(0.5 * np.sqrt(x))


def _local_second(x: np.ndarray) -> np.ndarray:
    """Return g''(x) of the logistic site."""
    v = 0.5 * np.sqrt(x)
    small = v < 1e-2
    v2 = v * v
    safe = np.where(small, 1.0, v)
    closed = (_tanh_over(safe) - 4.0 * _density(safe)) / safe**2
    return np.where(small, 2.0 / 3.0 - 8.0 * v2 / 15.0 + 34.0 * v2 * v2 / 105.0, closed) / 64.0


def local_site_precision(mean: np.ndarray, var: np.ndarray, shift: Any) -> np.ndarray:
    """Precision of the local site that joins N(mean, var), by Newton on its contact point.

    Parameters
    ----------
    mean, var : ndarray of shape (n,)
        Marginal of the predictor before the site is there; the variance may be zero.
    shift : ndarray or float
        Linear part of the site, half the label.

    Returns
    -------
    precision : ndarray of shape (n,)

    Notes
    -----
    Solves x = T(x), T(x) the second moment of the predictor once the site of contact point x is
    included. Where Newton leaves (0, inf) the plain step x <- T(x) takes its place.
    """
    total = mean + var * shift
    x = np.maximum(var + total**2, _TINY)
    for _ in range(60):  # nine are enough for twelve digits nearly everywhere
        kappa = 1.0 + var * _local_precision(x)
        moment = var / kappa + (total / kappa) ** 2
        slope = 2.0 * var * _local_second(x) * (var / kappa**2 + 2.0 * total**2 / kappa**3)
        step = (moment - x) / np.where(slope < 1.0, 1.0 - slope, 1.0)
        new = np.maximum(np.where(x + step > 0.0, x + step, moment), _TINY)
        done = np.all(np.abs(new - x) <= 1e-13 * x)
        x = new
        if done:
            break
    return _local_precision(x)


class LogisticSites:
    """Sites 1 / (1 + exp(-y s)) raised to the power of their weights.

    Parameters
    ----------
    sign : ndarray of shape (q,)
        Labels in {-1, +1}.
    weight : ndarray of shape (q,)
        Copies of each row.
    bound : {"kl", "local"}
    """

    def __init__(self, sign: np.ndarray, weight: np.ndarray, bound: str) -> None:
        self.sign, self.weight, self.bound = sign, weight, bound
        self.shift = 0.5 * weight * sign

    def of_rows(self, rows: slice) -> "LogisticSites":
        """Return the sites of some rows."""
        return LogisticSites(self.sign[rows], self.weight[rows], self.bound)

    def penalty(self, s: np.ndarray, z: np.ndarray) -> Penalty:
        """Return the `Penalty` at means s and variances z, both (q,)."""
        return self._kl(s, z) if self.bound == "kl" else self._local(s, z)

    def _kl(self, s: np.ndarray, z: np.ndarray) -> Penalty:
        wrong, loss, slope = logistic_mixture(-self.sign * s, z)
        curvature = self.weight * slope
        return Penalty(self.weight * loss, -self.sign * self.weight * wrong, curvature, curvature)

    def _local(self, s: np.ndarray, z: np.ndarray) -> Penalty:
        x = np.maximum(z + s * s, _TINY)
        v = 0.5 * np.sqrt(x)
        precision = self.weight * _local_precision(x)
        value = self.weight * (v + np.log1p(np.exp(-2.0 * v))) - self.shift * s
        share = np.where(z + s * s > 0, z / x, 1.0)
        curvature = share * precision + (1.0 - share) * self.weight * _density(v)
        return Penalty(value, precision * s - self.shift, curvature, precision)

    def joined(self, mean: np.ndarray, var: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Precision and shift of the Gaussian sites that join the marginals N(mean, var).

        Each row is its own problem with one copy of its site: the bound is maximised over that site
        alone, everything else about the predictor being summarised by its marginal.
        """
        if self.bound == "local":
            shift = 0.5 * self.sign
            return local_site_precision(mean, var, shift), shift
        one = LogisticSites(self.sign, np.ones(len(self.sign)), self.bound)
        s, z = np.array(mean, dtype=float), np.array(var, dtype=float)
        for _ in range(500):
            f = one.penalty(s, z)
            ds = -(var * f.slope + s - mean) / (1.0 + var * f.curvature)
            new = var / (1.0 + var * f.precision)
            settled = np.abs(ds) <= 1e-12 * (1.0 + np.abs(s))
            settled &= np.abs(new - z) <= 1e-12 * new
            s, z = s + ds, new
            if np.all(settled):
                break
        f = one.penalty(s, z)
        return f.precision, f.precision * s - f.slope
