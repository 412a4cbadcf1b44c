"""Rules of the row sites: moment matching, and power EP with a share of each likelihood."""

from functools import partial

import numpy as np

from .._engine.factor import Factor, Tilted
from .._engine.likelihoods import Logit
from .._engine.rules import MomentMatching, Power

__all__ = ["LogitToPower", "row_rule"]

_REACH = 7.0  # sd on each side of the mode; beyond, a share of 1e-11
_STEP = 0.7  # sd between nodes: the trapezoidal rule of a Gaussian is then exact to 1e-17
_POLES = 1.0  # longest step: poles are pi from the axis, so the error is exp(-2 pi^2) there
_SETTLED = 1e-6  # sd by which the centre of the nodes may miss the mode
_MOST_STEPS = 60


class LogitToPower(Factor):
    """sigma(y f)^u for u in (0, 1]."""

    log_concave = True
    logistic_slope = None

    def __init__(self, exponent):
        self.exponent = exponent

    def log_prob(self, y, f):
        """Return u log sigma(y f)."""
        return self.exponent * Logit().log_prob(y, f)

    def tilted(self, y, mean, var):
        """Return log Z and derivatives by the trapezoidal rule about the mode.

        Gradient and curvature are moments of those of the log factor, so that nothing cancels
        where the factor changes little.
        """
        y, mean, var = np.broadcast_arrays(*(np.asarray(a, dtype=float) for a in (y, mean, var)))
        out, mean, sd = np.empty((3, mean.size)), (y * mean).ravel(), np.sqrt(var).ravel()
        centre = _modes(self.exponent, mean, sd**2)
        steps = np.minimum(_STEP, _POLES / np.maximum(sd, 1e-300))
        size = 2 ** np.ceil(np.log2(_REACH / steps)).astype(int)  # few kinds of rules
        for half in np.unique(size):
            rows = size == half
            args = centre[rows], mean[rows], sd[rows]
            out[:, rows] = _sums(self.exponent, *args, np.arange(-half, half + 1) * _REACH / half)
        log_z, gradient, curvature = out.reshape(3, *var.shape)
        return Tilted(log_z, y * gradient, curvature)


def _modes(u, mean, var):
    """Return the modes of sigma(f)^u N(f; mean, var), by Newton's method within brackets."""
    low, high = mean, mean + u * var
    z = np.clip(np.maximum(mean, 0.5 * (low + np.minimum(high, 2.0))), low, high)
    for _ in range(_MOST_STEPS):
        rest = 1.0 / (1.0 + np.exp(np.minimum(z, 700.0)))  # 1 - sigma
        slope = (mean - z) / var + u * rest
        low, high = np.where(slope > 0, z, low), np.where(slope > 0, high, z)
        new = z + slope / (1.0 / var + u * rest * (1.0 - rest))
        new = np.where((new > low) & (new < high), new, 0.5 * (low + high))
        moved, z = np.max(np.abs(new - z) / np.sqrt(var), initial=0.0), new
        if moved < _SETTLED:
            break
    return z


def _sums(u, centre, mean, sd, nodes):
    """Return log Z, gradient and curvature of rows by even nodes, in sds of the Gaussian."""
    offset = (centre - mean) / sd
    total, first, second, inner = (np.zeros(mean.shape) for _ in range(4))
    top = -u * np.logaddexp(0.0, -centre) - 0.5 * offset**2
    for x in nodes:
        f = centre + sd * x
        log_sigma = -np.logaddexp(0.0, -f)
        weight = np.exp(u * log_sigma - 0.5 * (offset + x) ** 2 - top)
        rest = -np.expm1(log_sigma)  # 1 - sigma
        total += weight
        first += weight * rest
        second += weight * rest**2
        inner += weight * rest * np.exp(log_sigma)
    first, second, inner = first / total, second / total, inner / total
    log_z = top + np.log(total * (nodes[1] - nodes[0])) - 0.5 * np.log(2.0 * np.pi)
    return log_z, u * first, u * inner - u**2 * (second - first**2)


class RowLogit(Logit):
    """The logit, with powers by `LogitToPower`."""

    def powered(self, exponent):
        """Return sigma(y f)^exponent."""
        return LogitToPower(exponent)


def row_rule(power):
    """Return what maps (sign, sites, mean, var) of rows to their `SiteUpdate`.

    power is the share of the logit that is matched, 1 for moment matching.
    """
    return partial(MomentMatching() if power == 1.0 else Power(power), RowLogit())
