"""Likelihoods of a label y in {-1, +1} given a latent value f."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import erfcx, log_expit, log_ndtr

from .factor import Factor, Tilted
from .quadrature import logistic_moments

__all__ = ["LIKELIHOODS", "PROBIT_SLOPE", "LabelNoise", "Logit", "Probit", "normal_hazard"]

_SQRT2 = np.sqrt(2.0)
# Slope of the logistic function that is closest to the normal distribution function.
PROBIT_SLOPE = 1.702


def normal_hazard(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return r = N(z) / Phi(z) and r + z, both without cancellation for any finite z.

    Below z = -50 the sum r + z would lose every digit; there its asymptotic series takes over.
    """
    r = np.sqrt(2.0 / np.pi) / erfcx(-z / _SQRT2)
    t = np.maximum(-z, 50.0)
    series = (1.0 - 2.0 / t**2 + 10.0 / t**4 - 74.0 / t**6) / t
    return r, np.where(z < -50.0, series, r + z)


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
