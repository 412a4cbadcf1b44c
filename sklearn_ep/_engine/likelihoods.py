"""What a scalar factor has to answer, and likelihoods of a label y in {-1, +1} given f."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.special import expit, log_expit, log_ndtr

from .gaussian import normal_hazard, row_blocks
from .quadrature import logistic_moments, tilted_by_panels

_REACH = 7.0  # sd on each side of the mode; beyond, a share of 1e-11
_STEP = 0.7  # sd between nodes: the trapezoidal rule of a Gaussian is then exact to 1e-17
_POLES = 1.0  # longest step: poles are pi from the axis, so the error is exp(-2 pi^2) there
# Halvings of the interval that has the mode, which is up to 16 sd. Of 30,000 generated marginals,
# to powers .02, .5 and .9, moments are right to 1e-9; with 10 to 4e-8, with 4 to 7e-7.
_HALVINGS = 16
# Rows times nodes at once, which changes the time alone. Of generated marginals, to powers .02, .5
# and .9, 50 take .4 of the time of node by node and 2000 take .7; with 20,000 these take .8, and
# with 80,000 .85.
_NODES_AT_ONCE = 5_000
# Sd from which a row goes by panels, whose number does not grow: log Z is then right to 2e-7, with
# sds of 17 to 1e6 and powers of .1 to .9. The other rule has 240 nodes there.
_WIDE = 16.0
# Slope of the logistic function that is closest to the normal distribution function.
PROBIT_SLOPE = 1.702


class Tilted(NamedTuple):
    """log Z of a factor under N(mean, var), its gradient and its negative curvature in the mean."""

    log_z: np.ndarray
    gradient: np.ndarray
    curvature: np.ndarray


class Factor(Protocol):
    """A scalar factor t(y, f) of one latent value: a likelihood, or a prior that ignores y.

    A subclass defines `log_prob`; everything that expectation propagation and prediction need
    follows from it by quadrature. `tilted` may be replaced by a closed form.

    Attributes
    ----------
    log_concave : bool
        True promises that site precisions are never negative, which saves half of the algebra.
    logistic_slope : float or None
        Slope of the logistic function that stands for a likelihood where closed forms are wanted,
        to one per cent of the probabilities; None where there is none.
    """

    log_concave: bool = False
    logistic_slope: float | None = None

    def log_prob(self, y: Any, f: Any) -> Any:
        """Return log t(y, f); arrays that broadcast against each other."""
        raise TypeError(f"{type(self).__name__} must define log_prob(y, f) or tilted(y, mean, var)")

    def tilted(self, y: Any, mean: Any, var: Any) -> Tilted:
        """Return log E[t(y, f)] for f ~ N(mean, var) with its first two derivatives in the mean.

        Parameters
        ----------
        y, mean, var : ndarray of shape (n,)

        Returns
        -------
        Tilted
            Three arrays of shape (n,).
        """
        y, mean, var = np.broadcast_arrays(*(np.asarray(a, dtype=float) for a in (y, mean, var)))
        log_z, centre, spread = tilted_by_panels(lambda f: self.log_prob(y[:, None], f), mean, var)
        return Tilted(log_z, (centre - mean) / var, (var - spread) / var**2)

    def contraction(self, y: Any, mean: Any, var: Any, extra_var: Any, curvature: Any) -> Any:
        """Return 1 - var * curvature (n,), the variance of the tilted distribution over var.

        `curvature` is that of `tilted(y, mean, var + extra_var)`. A factor for which the difference
        cancels replaces this by a formula of its own.
        """
        return 1.0 - var * curvature

    def powered(self, exponent: float) -> "Factor":
        """Return the factor t(y, f)^exponent, as power EP needs it."""
        return _Powered(self, exponent)


class _Powered(Factor):
    """t^exponent of any factor, by quadrature."""

    def __init__(self, factor: Factor, exponent: float) -> None:
        self.factor, self.exponent = factor, exponent
        self.log_concave = factor.log_concave

    def log_prob(self, y: Any, f: Any) -> Any:
        return self.exponent * self.factor.log_prob(y, f)


class Probit(Factor):
    """p(y | f) = Phi(y f).

    Notes
    -----
    With B = 1 + var and z = y mean / sqrt(B): log Z = log Phi(z), gradient y r / sqrt(B) and
    curvature r (r + z) / B for r = N(z) / Phi(z) (Rasmussen and Williams 2006, eq. 3.58).
    """

    log_concave = True
    logistic_slope = PROBIT_SLOPE

    def log_prob(self, y: Any, f: Any) -> Any:
        """Return log Phi(y f)."""
        return log_ndtr(y * f)

    def tilted(self, y: Any, mean: Any, var: Any) -> Tilted:
        """Return log Z and derivatives in closed form."""
        total = 1.0 + var
        root = np.sqrt(total)
        z = y * mean / root
        r, r_plus_z = normal_hazard(z)
        return Tilted(log_ndtr(z), y * r / root, r * r_plus_z / total)


class Logit(Factor):
    """p(y | f) = 1 / (1 + exp(-y f))."""

    log_concave = True
    logistic_slope = 1.0

    def log_prob(self, y: Any, f: Any) -> Any:
        """Return log sigma(y f)."""
        return log_expit(y * f)

    def tilted(self, y: Any, mean: Any, var: Any) -> Tilted:
        """Return log Z and derivatives by the normal mixture of `logistic_moments`."""
        log_z, gradient, curvature = logistic_moments(y * mean, var)
        return Tilted(log_z, y * gradient, curvature)

    def powered(self, exponent: float) -> Factor:
        """Return sigma(y f)^exponent."""
        return self if exponent == 1.0 else LogitToPower(exponent)


class LogitToPower(Factor):
    """sigma(y f)^u for u in (0, 1]."""

    log_concave = True
    logistic_slope = None

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def log_prob(self, y: Any, f: Any) -> Any:
        """Return u log sigma(y f)."""
        return self.exponent * Logit().log_prob(y, f)

    def tilted(self, y: Any, mean: Any, var: Any) -> Tilted:
        """Return log Z and derivatives by the trapezoidal rule about the mode.

        Gradient and curvature are moments of those of the log factor, so that nothing cancels
        where the factor changes little. A Gaussian that is wide goes by panels.
        """
        y, mean, var = np.broadcast_arrays(*(np.asarray(a, dtype=float) for a in (y, mean, var)))
        out, mean, sd = np.empty((3, mean.size)), (y * mean).ravel(), np.sqrt(var).ravel()
        wide = sd > _WIDE
        if wide.any():
            out[:, wide] = super().tilted(1.0, mean[wide], sd[wide] ** 2)
        centre = _modes(self.exponent, mean, sd**2)
        steps = np.minimum(_STEP, _POLES / np.maximum(sd, 1e-300))
        size = 2 ** np.ceil(np.log2(_REACH / steps)).astype(int)  # few kinds of rules
        size[wide] = 0
        for half in np.unique(size[~wide]):
            nodes, same = np.arange(-half, half + 1) * _REACH / half, np.flatnonzero(size == half)
            for block in row_blocks(len(same), len(nodes), _NODES_AT_ONCE):
                rows = same[block]
                out[:, rows] = _sums(self.exponent, centre[rows], mean[rows], sd[rows], nodes)
        log_z, gradient, curvature = out.reshape(3, *var.shape)
        return Tilted(log_z, y * gradient, curvature)


def _modes(u: float, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """Return the modes of sigma(f)^u N(f; mean, var), to 1e-4 sd unless the Gaussian is wide."""
    low, high = mean, mean + u * var
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        rising = mean + u * var * expit(-middle) > middle
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    return 0.5 * (low + high)


def _sums(
    u: float, centre: np.ndarray, mean: np.ndarray, sd: np.ndarray, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log Z, gradient and curvature of rows by even nodes, in sds of the Gaussian."""
    offset = (centre - mean) / sd
    top = -u * np.logaddexp(0.0, -centre) - 0.5 * offset**2
    log_sigma = -np.logaddexp(0.0, -(centre + np.multiply.outer(nodes, sd)))
    weight = np.exp(u * log_sigma - 0.5 * np.add.outer(nodes, offset) ** 2 - top)
    rest = -np.expm1(log_sigma)  # 1 - sigma
    of_rest = weight * rest
    total, sums = weight.sum(axis=0), (of_rest, of_rest * rest, of_rest * np.exp(log_sigma))
    first, second, inner = (values.sum(axis=0) / total for values in sums)
    log_z = top + np.log(total * (nodes[1] - nodes[0])) - 0.5 * np.log(2.0 * np.pi)
    return log_z, u * first, u * inner - u**2 * (second - first**2)


class LabelNoise(Factor):
    """p(y | f) = e + (1 - 2 e) Phi(y f / s): a probit whose label is wrong with probability e.

    Parameters
    ----------
    rate : float
        Probability e of a wrong label, in [0, 0.5). Rate 0 is the probit.
    noise : float, default=1.0
        Variance s^2 of the white noise between the latent value and the sign.

    Notes
    -----
    Not log-concave: where label and cavity disagree the curvature, hence the site precision, is
    negative, and it has to stay so.
    """

    def __init__(self, rate: float, noise: float = 1.0) -> None:
        self.rate, self.noise = rate, noise
        self.log_concave = rate == 0
        self.logistic_slope = PROBIT_SLOPE / np.sqrt(noise) if rate == 0 else None

    def log_prob(self, y: Any, f: Any) -> Any:
        """Return log(e + (1 - 2 e) Phi(y f / s))."""
        return self._mix(log_ndtr(y * f / np.sqrt(self.noise)))

    def _mix(self, log_phi: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.logaddexp(np.log(self.rate), np.log1p(-2.0 * self.rate) + log_phi)

    def tilted(self, y: Any, mean: Any, var: Any) -> Tilted:
        """Return log Z and derivatives in closed form."""
        total = self.noise + var
        root = np.sqrt(total)
        z = y * mean / root
        log_phi = log_ndtr(z)
        log_z = self._mix(log_phi)
        r, r_plus_z = normal_hazard(z)
        share = np.exp(np.log1p(-2.0 * self.rate) + log_phi - log_z)
        # share * r (share * r + z), regrouped so that rate 0 keeps the digits of the probit
        curvature = share * r * (r_plus_z - (1.0 - share) * r) / total
        return Tilted(log_z, y * share * r / root, curvature)


LIKELIHOODS: dict[str, Callable[[], Factor]] = {"probit": Probit, "logit": Logit}
